"""Function-preserving growth: a larger model that computes the same function as a small one.

The built-in pair has a realistic acceptance rate but an unrealistic cost, because its target fits into a processor
cache. A grown model has the same output and the cost of its size. The hidden state gets coordinates that stay zero, the
layers get heads and neurons whose output is multiplied by zero, and the stack gets layers that add nothing. All other
added weights are random, so that no kernel can skip them; only matrices that write to the hidden state contain zeros.
The class of its shape holds everything specific to an architecture.
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

ORIGIN_FIELD = "foredraft_grown_from"  # key in config.json; reports repeat its value beside every figure
BUILT_IN_LABEL = "Foredraft's built-in target"  # origin of a model grown from the built-in target
BUILT_IN_SEQ2SEQ_LABEL = "Foredraft's built-in encoder-decoder"  # origin of one grown from the encoder-decoder
# Labels by the names of the built-in models.
_BUILT_IN_LABELS = {
    zoo.DEFAULT_TARGET: BUILT_IN_LABEL,
    "builtin-seq2seq": BUILT_IN_SEQ2SEQ_LABEL,
}
_SHAPE_CLASSES: tuple[type[ModelShape], ...] = (LlamaShape, T5Shape)
_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def parse_size(text: str) -> int:
    """Parse a number of parameters: '430M' -> 430000000.

    Raises:
        ForedraftError: the text is no number with an optional unit k, M or B.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().lower())
    if match is None or not (size := round(float(match[1]) * _SIZE_UNITS[match[2]])):
        raise ForedraftError(f"{text!r} is no number of parameters; write it as 430M, 1.5B or 430000000")
    return size


def read_shape(model: Any) -> ModelShape:
    """Read the dimensions of a model.

    Raises:
        ForedraftError: the model cannot be grown.
    """
    config = model.config
    for shape_class in _SHAPE_CLASSES:
        if shape_class.model_type == config.model_type:
            reason = shape_class.explain_unsupported(config)
            if reason is not None:
                raise ForedraftError(reason)
            return shape_class.from_model(model)
    raise ForedraftError(
        f"only {' and '.join(kind.title for kind in _SHAPE_CLASSES)} can be grown, and this is {config.model_type!r}; "
        "leave --model out to grow the built-in target"
    )


def grow_model(model: Any, shape: ModelShape, origin: str, seed: int = 0) -> Any:
    """Create a model of `shape` with the logits of `model`.

    Args:
        model: small model, which stays unchanged.
        shape: dimensions of the result, as `choose_shape` returns them.
        origin: name of the small model, stored in the configuration of the result.
        seed: seed of the random weights.

    Raises:
        ForedraftError: the architecture is not supported.
    """
    small = read_shape(model)
    result = _allocate_model(model, shape, origin)
    small_weights = dict(model.named_parameters())
    originals = {_mask_layer_index(name): original for name, original in reversed(small_weights.items())}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in result.named_parameters():
            is_norm = name.endswith("norm.weight")
            scale = shape.compute_norm_scale(name, small, model.config) if is_norm else 1.0
            if name.endswith(shape.residual_writers):
                weight.zero_()
            elif is_norm:
                weight.fill_(float(originals[_mask_layer_index(name)].float().mean()) * scale)
            else:
                _randomise(weight, originals[_mask_layer_index(name)], generator)
            if name in small_weights:
                weight[tuple(slice(size) for size in small_weights[name].shape)].copy_(
                    small_weights[name] * scale if is_norm else small_weights[name]
                )
    result.generation_config = model.generation_config
    return result.eval()


def _mask_layer_index(name: str) -> str:
    return re.sub(r"\d+", "#", name, count=1)  # only the first number is the layer index


def _allocate_model(model: Any, shape: ModelShape, origin: str) -> Any:
    from transformers.initialization import no_init_weights

    small = model.config
    config = type(small).from_dict(small.to_dict() | shape.get_config_changes(small) | {ORIGIN_FIELD: origin})
    with no_init_weights():
        result = shape.get_auto_class().from_config(config, dtype=model.dtype)
    result.tie_weights()
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        output = result.get_output_embeddings()
        if output.weight is result.get_input_embeddings().weight:  # T5 1.1: tied by its configuration only
            output.weight = nn.Parameter(torch.empty_like(output.weight))
    return result


def _randomise(weight: Tensor, original: Tensor, generator: torch.Generator) -> None:
    # Bounded like the original weights: the scale of a quantised row follows from its largest weight.
    spread = float(original.float().std())
    weight.copy_((torch.rand(weight.shape, generator=generator) * 2 - 1) * spread)


def read_origin(config: Any) -> str | None:
    """Return the origin of a grown model, or None for an ordinary one."""
    origin = getattr(config, ORIGIN_FIELD, None)
    return None if origin is None else str(origin)


def find_built_in_origin(config: Any) -> str | None:
    """Return the name of the built-in target that a model was grown from, or None."""
    origin = read_origin(config) or ""
    return next((name for name, label in _BUILT_IN_LABELS.items() if origin.startswith(label)), None)


def save(model: Any, tokenizer: Any | None, out: Path, origin: str) -> None:
    """Write the model, its tokenizer and a model card.

    Raises:
        ForedraftError: the folder exists and is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ForedraftError(f"{out} exists and is not an empty folder; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    (out / "README.md").write_text(render_card(model, origin), encoding="utf-8")


def render_card(model: Any, origin: str) -> str:
    """Render the model card as Markdown."""
    shape = read_shape(model)
    return (
        f"# A grown model: {shape.parameters / 1e6:.1f}M parameters, the function of {origin}\n\n"
        "Written by `foredraft bench grow` to measure realistic acceptance at realistic cost. Its output equals\n"
        "that of the original model, so it is no better. Added coordinates of the hidden state are zero. The output\n"
        "of added heads and neurons is multiplied by zero. Added layers add nothing.\n\n"
        f"- {shape}\n"
        f"- `{ORIGIN_FIELD}` in config.json names the original; benchmarks repeat it beside every figure.\n"
    )


def grow_to(name: str | None, parameters: int, out: Path, seed: int = 0) -> ModelShape:
    """Grow a model and write the result.

    Args:
        name: folder, hub id or built-in name; None = the built-in target.
        parameters: number of parameters of the result, approximately.
        out: folder that is new or empty.
        seed: seed of the random weights.

    Raises:
        ForedraftError: the model cannot be grown to this size, or `out` is not empty.
    """
    from foredraft.models.loading import load_model, load_tokenizer

    built_in = zoo.resolve_target(name)
    source = str(name) if built_in is None else str(zoo.find_target_folder(built_in))
    model = load_model(source, "auto", torch.device("cpu"))
    small = read_shape(model)
    label = Path(source).name if built_in is None else _BUILT_IN_LABELS[built_in]
    origin = f"{label} ({small.parameters / 1e6:.1f}M parameters)"
    shape = choose_shape(small, parameters)
    save(grow_model(model, shape, origin, seed), load_tokenizer(source), out, origin)
    return shape
