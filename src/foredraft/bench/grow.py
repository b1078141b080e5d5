"""Function-preserving enlargement: a model of the size asked for that computes what a small one computes.

Speculation on the built-in pair has a real acceptance rate and an unreal cost: its target fits a cache. Grown, the same
text comes out of a model that costs what its size costs. The hidden state gets further coordinates that stay zero, the
layers further heads and neurons that nothing reads, the stack further layers that add nothing. Whatever may be is
random, so that no kernel can skip it: only the matrices that write to the hidden state have zeros. What is different
from one architecture to the next is in the class of its shape.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foredraft import zoo
from foredraft.bench.grow_llama import Llama
from foredraft.bench.grow_pair import Pair
from foredraft.bench.grow_shape import Shape, plan
from foredraft.errors import ForedraftError

FIELD = "foredraft_grown_from"  # in config.json: every figure of such a model names what it was grown from
BUILT_IN = "Foredraft's built-in target"  # as an origin...
BUILT_IN_PAIR = "Foredraft's built-in encoder-decoder"  # ... and the other one
_ORIGINS = {zoo.FIRST: BUILT_IN, "builtin-seq2seq": BUILT_IN_PAIR}  # by the name as a model
_SHAPES: tuple[type[Shape], ...] = (Llama, Pair)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def parse_size(text: str) -> int:
    """'430M' -> 430000000. Raises ForedraftError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().lower())
    if found is None or not (size := round(float(found[1]) * _UNITS[found[2]])):
        raise ForedraftError(f"{text!r} is no number of parameters; write it as 430M, 1.5B or 430000000")
    return size


def shape_of(model: Any) -> Shape:
    """The sizes of a model. Raises ForedraftError for one that cannot be grown."""
    config = model.config
    for kind in _SHAPES:
        if kind.model_type == config.model_type:
            why = kind.refusal(config)
            if why is not None:
                raise ForedraftError(why)
            return kind.of(model)
    raise ForedraftError(
        f"only {' and '.join(kind.title for kind in _SHAPES)} can be grown, and this is {config.model_type!r}; "
        "leave --model out to grow the built-in target"
    )


def grown(model: Any, shape: Shape, origin: str, seed: int = 0) -> Any:
    """A model of `shape` with the logits of `model`. Raises ForedraftError for an architecture this does not know."""
    small = shape_of(model)
    result = _empty(model, shape, origin)
    old = dict(model.named_parameters())
    like = {_kind(name): weight for name, weight in reversed(old.items())}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, new in result.named_parameters():
            is_norm = name.endswith("norm.weight")
            scale = shape.norm_scale(name, small, model.config) if is_norm else 1.0
            if name.endswith(shape.writers):
                new.zero_()
            elif is_norm:
                new.fill_(float(like[_kind(name)].float().mean()) * scale)
            else:
                _randomise(new, like[_kind(name)], generator)
            if name in old:
                new[tuple(slice(size) for size in old[name].shape)].copy_(old[name] * scale if is_norm else old[name])
    result.generation_config = model.generation_config
    return result.eval()


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name, count=1)  # the first number is the layer's; one after it, the place in the layer


def _empty(model: Any, shape: Shape, origin: str) -> Any:
    from transformers.initialization import no_init_weights

    small = model.config
    config = type(small).from_dict(small.to_dict() | shape.changes(small) | {FIELD: origin})
    with no_init_weights():
        result = shape.maker().from_config(config, dtype=model.dtype)
    result.tie_weights()
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        out = result.get_output_embeddings()
        if out.weight is result.get_input_embeddings().weight:  # T5 1.1: tied by its configuration, not by its weights
            out.weight = nn.Parameter(torch.empty_like(out.weight))
    return result


def _randomise(new: Tensor, like: Tensor, generator: torch.Generator) -> None:
    # no larger than usual weights: a quantised row takes its scale from its largest one
    spread = float(like.float().std())
    new.copy_((torch.rand(new.shape, generator=generator) * 2 - 1) * spread)


def grown_from(config: Any) -> str | None:
    """What a model was grown from, or None for an ordinary one."""
    found = getattr(config, FIELD, None)
    return None if found is None else str(found)


def grown_from_built_in(config: Any) -> str | None:
    """The name of the built-in target a model was grown from, or None."""
    origin = grown_from(config) or ""
    return next((name for name, label in _ORIGINS.items() if origin.startswith(label)), None)


def save(model: Any, tokenizer: Any | None, out: Path, origin: str) -> None:
    """Write the model, its tokenizer and a card."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ForedraftError(f"{out} exists and is not an empty folder; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    (out / "README.md").write_text(card(model, origin), encoding="utf-8")


def card(model: Any, origin: str) -> str:
    """The model card, as Markdown."""
    shape = shape_of(model)
    return (
        f"# A grown model: {shape.parameters / 1e6:.1f}M parameters, the function of {origin}\n\n"
        "Made by `foredraft bench grow` to measure real acceptance at a real cost. It writes the very text of the\n"
        "model it was grown from, and is no better: further coordinates of the hidden state are zero, further heads\n"
        "and neurons are random and read by nothing, further layers add nothing.\n\n"
        f"- {shape}\n"
        f"- `{FIELD}` in config.json names its origin; the benchmarks repeat it beside every figure.\n"
    )


def grow_to(name: str | None, parameters: int, out: Path, seed: int = 0) -> Shape:
    """Grow a model by folder, hub id or built-in name, None = the built-in target, and write it.

    Raises ForedraftError.
    """
    from foredraft.models.load import load_model, load_tokenizer

    built_in = zoo.target_name(name)
    place = str(name) if built_in is None else str(zoo.target(built_in))
    model = load_model(place, "auto", torch.device("cpu"))
    small = shape_of(model)
    label = Path(place).name if built_in is None else _ORIGINS[built_in]
    origin = f"{label} ({small.parameters / 1e6:.1f}M parameters)"
    shape = plan(small, parameters)
    save(grown(model, shape, origin, seed), load_tokenizer(place), out, origin)
    return shape
