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
from foredraft.bench.grow_llama import LlamaShape
from foredraft.bench.grow_pair import T5Shape
from foredraft.bench.grow_shape import ModelShape, choose_shape
from foredraft.errors import ForedraftError

ORIGIN_FIELD = "foredraft_grown_from"  # in config.json: every figure of such a model names what it was grown from
BUILT_IN_LABEL = "Foredraft's built-in target"  # as an origin...
BUILT_IN_SEQ2SEQ_LABEL = "Foredraft's built-in encoder-decoder"  # ... and the other one
_BUILT_IN_LABELS = {
    zoo.DEFAULT_TARGET: BUILT_IN_LABEL,
    "builtin-seq2seq": BUILT_IN_SEQ2SEQ_LABEL,
}  # by the name as a model
_SHAPE_CLASSES: tuple[type[ModelShape], ...] = (LlamaShape, T5Shape)
_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def parse_size(text: str) -> int:
    """'430M' -> 430000000. Raises ForedraftError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().lower())
    if found is None or not (size := round(float(found[1]) * _SIZE_UNITS[found[2]])):
        raise ForedraftError(f"{text!r} is no number of parameters; write it as 430M, 1.5B or 430000000")
    return size


def read_shape(model: Any) -> ModelShape:
    """The sizes of a model. Raises ForedraftError for one that cannot be grown."""
    config = model.config
    for kind in _SHAPE_CLASSES:
        if kind.model_type == config.model_type:
            why = kind.get_obstacle(config)
            if why is not None:
                raise ForedraftError(why)
            return kind.from_model(model)
    raise ForedraftError(
        f"only {' and '.join(kind.title for kind in _SHAPE_CLASSES)} can be grown, and this is {config.model_type!r}; "
        "leave --model out to grow the built-in target"
    )


def grow_model(model: Any, shape: ModelShape, origin: str, seed: int = 0) -> Any:
    """A model of `shape` with the logits of `model`. Raises ForedraftError for an architecture this does not know."""
    small = read_shape(model)
    result = _allocate_model(model, shape, origin)
    old = dict(model.named_parameters())
    like = {_mask_layer_index(name): weight for name, weight in reversed(old.items())}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, new in result.named_parameters():
            is_norm = name.endswith("norm.weight")
            scale = shape.compute_norm_scale(name, small, model.config) if is_norm else 1.0
            if name.endswith(shape.residual_writers):
                new.zero_()
            elif is_norm:
                new.fill_(float(like[_mask_layer_index(name)].float().mean()) * scale)
            else:
                _randomise(new, like[_mask_layer_index(name)], generator)
            if name in old:
                new[tuple(slice(size) for size in old[name].shape)].copy_(old[name] * scale if is_norm else old[name])
    result.generation_config = model.generation_config
    return result.eval()


def _mask_layer_index(name: str) -> str:
    return re.sub(r"\d+", "#", name, count=1)  # the first number is the layer's; one after it, the place in the layer


def _allocate_model(model: Any, shape: ModelShape, origin: str) -> Any:
    from transformers.initialization import no_init_weights

    small = model.config
    config = type(small).from_dict(small.to_dict() | shape.get_config_changes(small) | {ORIGIN_FIELD: origin})
    with no_init_weights():
        result = shape.get_auto_class().from_config(config, dtype=model.dtype)
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


def read_origin(config: Any) -> str | None:
    """Return the origin of a grown model, or None for an ordinary one."""
    found = getattr(config, ORIGIN_FIELD, None)
    return None if found is None else str(found)


def find_built_in_origin(config: Any) -> str | None:
    """The name of the built-in target a model was grown from, or None."""
    origin = read_origin(config) or ""
    return next((name for name, label in _BUILT_IN_LABELS.items() if origin.startswith(label)), None)


def save(model: Any, tokenizer: Any | None, out: Path, origin: str) -> None:
    """Write the model, its tokenizer and a card."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ForedraftError(f"{out} exists and is not an empty folder; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    (out / "README.md").write_text(render_card(model, origin), encoding="utf-8")


def render_card(model: Any, origin: str) -> str:
    """The model card, as Markdown."""
    shape = read_shape(model)
    return (
        f"# A grown model: {shape.parameters / 1e6:.1f}M parameters, the function of {origin}\n\n"
        "Made by `foredraft bench grow` to measure real acceptance at a real cost. It writes the very text of the\n"
        "model it was grown from, and is no better: further coordinates of the hidden state are zero, further heads\n"
        "and neurons are random and read by nothing, further layers add nothing.\n\n"
        f"- {shape}\n"
        f"- `{ORIGIN_FIELD}` in config.json names its origin; the benchmarks repeat it beside every figure.\n"
    )


def grow_to(name: str | None, parameters: int, out: Path, seed: int = 0) -> ModelShape:
    """Grow a model by folder, hub id or built-in name, None = the built-in target, and write it.

    Raises ForedraftError.
    """
    from foredraft.models.loading import load_model, load_tokenizer

    built_in = zoo.resolve_target(name)
    place = str(name) if built_in is None else str(zoo.find_target_folder(built_in))
    model = load_model(place, "auto", torch.device("cpu"))
    small = read_shape(model)
    label = Path(place).name if built_in is None else _BUILT_IN_LABELS[built_in]
    origin = f"{label} ({small.parameters / 1e6:.1f}M parameters)"
    shape = choose_shape(small, parameters)
    save(grow_model(model, shape, origin, seed), load_tokenizer(place), out, origin)
    return shape
