"""Function-preserving enlargement: a model of the size asked for that computes what a small one computes.

Speculation on the built-in pair has a real acceptance rate and an unreal cost: its target fits a cache. Grown, the same
text comes out of a model that costs what its size costs. The hidden state gets further coordinates that stay zero, the
layers further heads and neurons that nothing reads, the stack further layers that add nothing. Whatever may be is
random, so that no kernel can skip it: only the matrices that write to the hidden state have zeros.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ForedraftError

FIELD = "foredraft_grown_from"  # in config.json: every figure of such a model names what it was grown from
BUILT_IN = "Foredraft's built-in target"  # as an origin
MULTIPLE = 128  # of the intermediate size
NEAR = 0.005  # of the size asked for: within it the proportions of the original decide
RATIOS = (1024, 256, 64, 16, 4, 1)  # powers of 4, so that the scale of the norms, a square root, is a power of 2
_WRITERS = ("o_proj.weight", "down_proj.weight")  # what adds to the hidden state
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


@dataclass(frozen=True)
class Shape:
    """What decides the size of a Llama."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    head_dim: int
    embeddings: int  # rows of the embeddings, and of the output where it is not tied to them

    @classmethod
    def of(cls, config: Any) -> "Shape":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads,
            config.num_hidden_layers, head_dim, config.vocab_size * (1 if config.tie_word_embeddings else 2),
        )  # fmt: skip

    @property
    def parameters(self) -> int:
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        layer = self.hidden * (heads + 3 * self.intermediate + 2)
        return self.layers * layer + self.hidden * (self.embeddings + 1)


def parse_size(text: str) -> int:
    """'430M' -> 430000000. Raises ForedraftError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().lower())
    if found is None or not (size := round(float(found[1]) * _UNITS[found[2]])):
        raise ForedraftError(f"{text!r} is no number of parameters; write it as 430M, 1.5B or 430000000")
    return size


def plan(small: Shape, parameters: int) -> Shape:
    """The widest shape of about that many parameters; near the count, the one of the most usual proportions."""
    for ratio in RATIOS:
        wide = [shape for shape in _of_width(small, ratio, parameters) if shape.parameters >= small.parameters]
        if wide:
            return min(wide, key=lambda shape: _strangeness(shape, small, ratio, parameters))
    raise ForedraftError(
        f"a model of {small.parameters / 1e6:.1f}M parameters cannot be grown to {parameters / 1e6:.1f}M; ask for more"
    )


def _of_width(small: Shape, ratio: int, parameters: int) -> Iterator[Shape]:
    hidden = small.hidden * ratio
    least = max(small.intermediate, hidden)
    for layers in range(small.layers, 1 << 14):
        # the heads grow with the hidden state: their number per key head, and so who attends to whom, stays
        bare = Shape(
            hidden, 0, small.heads * ratio, small.kv_heads * ratio, layers, small.head_dim, small.embeddings
        )  # fmt: skip
        room = (parameters - bare.parameters) / (3 * hidden * layers)
        if room < least - MULTIPLE / 2:
            return
        neurons = max(-(-least // MULTIPLE), round(room / MULTIPLE)) * MULTIPLE
        yield Shape(**{**asdict(bare), "intermediate": neurons})


def _strangeness(shape: Shape, small: Shape, ratio: int, parameters: int) -> tuple[float, float]:
    error = abs(shape.parameters - parameters) / parameters
    usual = small.intermediate * ratio
    return (0.0 if error <= NEAR else error), max(shape.intermediate / usual, usual / shape.intermediate)


def grown(model: Any, shape: Shape, origin: str, seed: int = 0) -> Any:
    """A model of `shape` with the logits of `model`. Raises ForedraftError for an architecture this does not know."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    _check(model.config)
    config = _config(model.config, shape, origin)
    with no_init_weights():
        result = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    result.tie_weights()
    old = dict(model.named_parameters())
    like = {re.sub(r"\d+", "#", name): weight for name, weight in reversed(old.items())}
    generator = torch.Generator().manual_seed(seed)
    scale = (model.config.hidden_size / shape.hidden) ** 0.5  # of the norms: they divide by a mean that zeros dilute
    with torch.no_grad():
        for name, new in result.named_parameters():
            reference = like[re.sub(r"\d+", "#", name)]
            _fill(new, reference, name, generator)
            if name.endswith("norm.weight"):
                new.mul_(scale)
            if name in old:
                place = new[tuple(slice(size) for size in old[name].shape)]
                place.copy_(old[name] * scale if name.endswith("norm.weight") else old[name])
    result.generation_config = model.generation_config
    return result.eval()


def _fill(new: Tensor, like: Tensor, name: str, generator: torch.Generator) -> None:
    """What the original has no value for: zeros where the hidden state is written, random where it is read."""
    if name.endswith((*_WRITERS, "embed_tokens.weight")):
        new.zero_()
    elif name.endswith("norm.weight"):
        new.fill_(float(like.float().mean()))
    else:
        # no larger than usual weights: a quantised row takes its scale from its largest one
        spread = float(like.float().std())
        new.copy_((torch.rand(new.shape, generator=generator) * 2 - 1) * spread)


def _check(config: Any) -> None:
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise ForedraftError(
            f"only Llama models without biases can be grown, and this is {config.model_type!r}; "
            "leave --model out to grow the built-in target"
        )
    if config.pretraining_tp != 1:
        raise ForedraftError("a model with pretraining_tp other than 1 cannot be grown")


def _config(small: Any, shape: Shape, origin: str) -> Any:
    values = small.to_dict() | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": shape.layers,
        "head_dim": shape.head_dim,
        "rms_norm_eps": small.rms_norm_eps * small.hidden_size / shape.hidden,
        FIELD: origin,
    }
    return type(small).from_dict(values)


def grown_from(config: Any) -> str | None:
    """What a model was grown from, or None for an ordinary one."""
    found = getattr(config, FIELD, None)
    return None if found is None else str(found)


def save(model: Any, tokenizer: Any | None, out: Path, origin: str) -> None:
    """Write the model, its tokenizer and a card."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ForedraftError(f"{out} exists and is not an empty folder; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    (out / "README.md").write_text(card(model.config, origin), encoding="utf-8")


def card(config: Any, origin: str) -> str:
    """The model card, as Markdown."""
    shape = Shape.of(config)
    return (
        f"# A grown model: {shape.parameters / 1e6:.1f}M parameters, the function of {origin}\n\n"
        "Made by `foredraft bench grow` to measure real acceptance at a real cost. It writes the very text of the\n"
        "model it was grown from, and is no better: further coordinates of the hidden state are zero, further heads\n"
        "and neurons are random and read by nothing, further layers add nothing.\n\n"
        f"- hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.heads} heads, {shape.kv_heads} key heads "
        f"of {shape.head_dim}, {shape.layers} layers\n"
        f"- `{FIELD}` in config.json names its origin; the benchmarks repeat it beside every figure.\n"
    )


def grow_to(name: str | None, parameters: int, out: Path, seed: int = 0) -> Shape:
    """Grow a model by folder or hub id, None = the built-in target, and write it. Raises ForedraftError."""
    from foredraft import zoo
    from foredraft.models.load import load_model, load_tokenizer

    place = name or str(zoo.path("target"))
    model = load_model(place, "auto", torch.device("cpu"))
    _check(model.config)
    small = Shape.of(model.config)
    label = BUILT_IN if name is None else Path(name).name
    origin = f"{label} ({small.parameters / 1e6:.1f}M parameters)"
    shape = plan(small, parameters)
    save(grown(model, shape, origin, seed), load_tokenizer(place), out, origin)
    return shape
