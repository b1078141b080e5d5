"""Chimera heads as `foredraft train chimera` writes them; their authors' own files are pickles beside a whole model."""

import re
from typing import Any

from foredraft.checkpoints.base import Checkpoint, ChimeraShape, TargetFacts
from foredraft.checkpoints.claims import Claims
from foredraft.checkpoints.layers import block_shape, layer_tensors
from foredraft.checkpoints.tensors import TensorFiles
from foredraft.models.window import NORMED

METHOD, TITLE = "chimera", "Chimera heads"
MARK = "trigram.weight"
TAPS = "target_layer_taps"
HEAD = re.compile(r"^heads\.(\d+)\.weight$")
NORMS = ("input_layernorm", "post_attention_layernorm")


def is_mine(name: str) -> bool:
    return name == MARK


def read(files: TensorFiles, config: dict[str, Any], target: TargetFacts) -> Checkpoint:
    claims = Claims(files, {name: name for name in files.stored})
    shape = _shape(claims, config, target)
    claims.check(expected(shape))
    return Checkpoint(METHOD, "Chimera", files.folder, shape, claims.read(), config)


def _shape(claims: Claims, config: dict[str, Any], target: TargetFacts) -> ChimeraShape:
    hidden = claims.shape("norm.weight", 1)[0]
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    claims.check_target("vocabulary size", config.get("vocab_size", target.vocab_size), target.name, target.vocab_size)
    found = [int(match[1]) for name in claims.stored if (match := HEAD.match(name))]
    num_heads = 1 + max(found, default=0)
    if num_heads > len(claims.stored):  # a gap between them shows as a missing tensor later
        raise claims.missing("heads.0.weight")
    taps = _taps(claims, config, target)
    return ChimeraShape(block_shape(claims, config, hidden), target.vocab_size, taps, num_heads)


def _taps(claims: Claims, config: dict[str, Any], target: TargetFacts) -> tuple[int, ...]:
    given, n = config.get(TAPS), target.num_layers
    is_list = isinstance(given, list) and all(isinstance(tap, int) and not isinstance(tap, bool) for tap in given)
    if not is_list or not given or len(set(given)) != len(given):
        raise claims.refuse(f"config.json has to say {TAPS}, different boundaries of the target, and says {given!r}")
    if any(tap != NORMED and not 0 <= tap <= n for tap in given):
        raise claims.refuse(
            f"it reads the boundaries {given} of its target, and {target.name} has {n} layers; use a drafter for this "
            "target"
        )
    return tuple(given)


def expected(shape: ChimeraShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a shape."""
    hidden = shape.block.hidden
    found: dict[str, tuple[int, ...]] = {
        MARK: (hidden, 3 * hidden),
        "join.weight": (hidden, 2 * hidden),
        "norm.weight": (hidden,),
    }
    if shape.has_fc:
        found["fc.weight"] = (hidden, len(shape.taps) * hidden)
    for i in range(shape.num_heads):
        found |= {f"heads.{i}.weight": (hidden, 2 * hidden), f"heads.{i}.bias": (hidden,)}
    return found | layer_tensors(shape.block, 0, hidden, NORMS)
