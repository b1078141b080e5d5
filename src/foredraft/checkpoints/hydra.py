"""Hydra heads as their authors publish them, and two shorter forms of ours.

Of the authors' architectures "mlp" is read. Ours differ by what is missing: a folder without `hydra_lm_head.*`
whose config.json says `foredraft_lm_head: "target"` borrows the target's output matrix; one with `hydra_reduce.*` has
heads that read a projection of their input.
"""

import logging
import re
from typing import Any

from foredraft.checkpoints.base import Checkpoint, HydraShape, TargetFacts
from foredraft.checkpoints.claims import Claims
from foredraft.checkpoints.tensors import TensorFiles

METHOD, TITLE = "hydra", "Hydra heads"
ARCHITECTURE, BORROWED = "hydra_head_arch", "foredraft_lm_head"
BLOCK = re.compile(r"^hydra_mlp\.(\d+)\.(\d+)\.")
MINE = re.compile(r"^(hydra_mlp|hydra_lm_head|hydra_reduce|prefix_embeding_layer)\.")
EMBEDDING = "input_embed_fn.weight"  # the target's own, which torch stores with the heads
UNREAD = {
    "prefix-mlp": "its heads read a decoder layer over the target's states",
    "cross-attn": "its heads attend to the target's states",
    "eagle-attn": "it is a decoder layer and no heads",
}
log = logging.getLogger(__name__)


def is_mine(names: list[str], config: dict[str, Any]) -> bool:
    """Whether the stored names or the config say Hydra; a whole model's config may say what it likes."""
    is_said = ARCHITECTURE in config or "hydra_num_heads" in config
    return any(map(MINE.match, names)) or (is_said and "model.embed_tokens.weight" not in names)


def read(files: TensorFiles, config: dict[str, Any], target: TargetFacts) -> Checkpoint:
    """Heads and layers are counted from the keys."""
    _check_architecture(files, config)
    claims = Claims(files, {name: name for name in files.stored if name != EMBEDDING})
    shape = _shape(claims, config, target)
    claims.check(expected(shape))
    said = config.get("hydra_num_heads", shape.num_heads)
    if said != shape.num_heads:
        log.info("%s: config.json says %s heads, the weights hold %d", files.folder, said, shape.num_heads)
    kind = "Hydra" if shape.has_own_head and shape.rank is None else "lean Hydra"
    return Checkpoint(METHOD, kind, files.folder, shape, claims.read(), config)


def _check_architecture(files: TensorFiles, config: dict[str, Any]) -> None:
    found = config.get(ARCHITECTURE, "mlp")
    if any(name.startswith("prefix_embeding_layer.") for name in files.stored):
        found = "prefix-mlp"
    if found != "mlp":
        why = UNREAD.get(str(found), "nothing of that name is known")
        raise files.refuse(f"its {ARCHITECTURE} is {found!r}, which is not supported ({why}); only 'mlp' is")
    if not config.get("grounded_heads", True):
        raise files.refuse("its heads are not grounded (grounded_heads false), which is not supported")


def _shape(claims: Claims, config: dict[str, Any], target: TargetFacts) -> HydraShape:
    blocks = [match for name in claims.stored if (match := BLOCK.match(name))]
    num_heads = 1 + max((int(match[1]) for match in blocks), default=0)
    num_layers = 1 + max((int(match[2]) for match in blocks), default=0)
    if num_heads * num_layers > len(claims.stored):
        raise claims.missing(f"a part of {num_heads} heads of {num_layers} layers")
    hidden = claims.shape("hydra_mlp.0.0.linear.weight", 2)[0]
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    claims.check_target("vocabulary size", config.get("vocab_size", target.vocab_size), target.name, target.vocab_size)
    has_own_head = any(name.startswith("hydra_lm_head.") for name in claims.stored)
    if has_own_head:
        rows = claims.shape("hydra_lm_head.0.weight", 2)[0]
        claims.check_target("vocabulary size", rows, target.name, target.vocab_size)
    elif config.get(BORROWED) != "target":
        raise claims.missing("hydra_lm_head.0.weight")
    offset = config.get("hidden_state_offset", 0)
    if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset <= target.num_layers:
        raise claims.refuse(
            f"hidden_state_offset in config.json is {offset!r} and has to be a whole number from 0 to the "
            f"{target.num_layers} layers of {target.name}"
        )
    return HydraShape(
        hidden=hidden,
        vocab_size=target.vocab_size,
        num_heads=num_heads,
        num_layers=num_layers,
        has_own_head=has_own_head,
        rank=claims.shape("hydra_reduce.0.weight", 2)[0] if "hydra_reduce.0.weight" in claims else None,
        offset=offset,
    )


def expected(shape: HydraShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a shape."""
    found: dict[str, tuple[int, ...]] = {}
    for head in range(shape.num_heads):
        seen = (head + 2) * shape.hidden
        for layer in range(shape.num_layers):
            width = shape.hidden if layer else shape.rank or seen
            found[f"hydra_mlp.{head}.{layer}.linear.weight"] = (shape.hidden, width)
            found[f"hydra_mlp.{head}.{layer}.linear.bias"] = (shape.hidden,)
            if layer == 0:
                found[f"hydra_mlp.{head}.0.res_connection.weight"] = (shape.hidden, width)
                found[f"hydra_mlp.{head}.0.res_connection.bias"] = (shape.hidden,)
        if shape.rank is not None:
            found[f"hydra_reduce.{head}.weight"] = (shape.rank, seen)
        if shape.has_own_head:
            found[f"hydra_lm_head.{head}.weight"] = (shape.vocab_size, shape.hidden)
            found[f"hydra_lm_head.{head}.bias"] = (shape.vocab_size,)
    return found
