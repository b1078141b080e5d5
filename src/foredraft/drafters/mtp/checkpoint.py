"""Reader of MTP layers, in the folder of a target or in one of their own."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.tensor_claims import WEIGHT_DTYPES, TensorClaims
from foredraft.checkpoints.tensors import TensorFiles, open_tensors
from foredraft.drafters.mtp.shape import MtpShape
from foredraft.drafters.mtp.spellings import PROJECTION, QWEN, SPELLINGS, Spelling, find_spelling
from foredraft.errors import ForedraftError
from foredraft.files import hub

NAME = "mtp"
LAYER_PREFIX = "layer."
FLAGS_KEY = "foredraft_mtp"  # entry of config.json with the flags that the stored names do not determine
FLAGS = ("puts_state_first", "zeroes_first", "has_output_norm")
EXPERT_NAME = re.compile(r"^(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Read an MTP layer: one of a target's folder, or one that `foredraft train mtp` wrote.

    Raises:
        ForedraftError: if there is none, or it is quantised or made for another target.
    """
    spelling = find_spelling(files.stored_tensors, target.num_layers)
    if spelling is None:
        raise files.refuse(
            "it holds no MTP layer whose names are known "
            f"({', '.join(one.name for one in SPELLINGS)}); `foredraft train mtp` makes one for any target"
        )
    claims = TensorClaims(files, _map_names(files, spelling))
    hidden, width = claims.require_shape(f"{PROJECTION}.weight", 2)
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    if width != 2 * hidden:
        raise claims.refuse(f"{spelling.parts[PROJECTION]} is {[hidden, width]} and has to be {[hidden, 2 * hidden]}")
    for stored in claims.stored_names.values():
        if files.stored_tensors[stored].dtype not in WEIGHT_DTYPES:
            raise claims.refuse(f"{stored} is quantised, and quantised MTP layers are not supported")
    flags = spelling.flags | _read_flags(files, config)
    shape = MtpShape.from_flags(hidden, target.vocab_size, flags)
    return Checkpoint(NAME, f"MTP ({spelling.name})", files.folder, shape, _fuse_experts(claims.read()), config)


def read_from_target(target: TargetInfo) -> Checkpoint:
    """Read the MTP layer in the target's own folder.

    Raises:
        ForedraftError: if the target has no folder or no MTP layer.
    """
    folder = hub.find_folder(target.name)
    return read(open_tensors(folder, target.name), {}, target)


def _map_names(files: TensorFiles, spelling: Spelling) -> dict[str, str]:
    """Map internal names to stored names."""
    parts = {f"{part}.weight": stored for part, stored in spelling.parts.items() if stored in files.stored_tensors}
    own = {*spelling.parts.values(), *(spelling.layer + name for name in spelling.copies)}
    layer = {
        LAYER_PREFIX + stored.removeprefix(spelling.layer): stored
        for stored in files.stored_tensors
        if stored.startswith(spelling.layer) and stored not in own and not stored.endswith(".rotary_emb.inv_freq")
    }
    return parts | layer


def _read_flags(files: TensorFiles, config: Mapping[str, Any]) -> dict[str, bool]:
    flags = config.get(FLAGS_KEY, {})
    if not isinstance(flags, dict) or not all(key in FLAGS and isinstance(flags[key], bool) for key in flags):
        raise files.refuse(f"{FLAGS_KEY} in config.json has to set some of {', '.join(FLAGS)} to true or false")
    return flags


def _fuse_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the matrices of experts, which transformers keeps in one tensor each: `gate_up_proj`, `down_proj`."""
    fused: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        match = EXPERT_NAME.match(name)
        if match is None:
            fused[name] = tensor
        else:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    for prefix, held in experts.items():
        indices = range(1 + max(i for i, _ in held))
        if len(held) != 3 * len(indices):
            raise ForedraftError(f"{prefix} has {len(held)} matrices for {len(indices)} experts, and 3 each are needed")
        fused[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([held[i, "gate"], held[i, "up"]]) for i in indices])
        fused[f"{prefix}.down_proj"] = torch.stack([held[i, "down"] for i in indices])
    return fused


def make_layout(shape: MtpShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use Qwen's names, with the flags in config.json."""
    stored = {
        QWEN.layer + name.removeprefix(LAYER_PREFIX)
        if name.startswith(LAYER_PREFIX)
        else QWEN.parts[name.removesuffix(".weight")]: tensor
        for name, tensor in tensors.items()
    }
    flags = {name: getattr(shape, name) for name in FLAGS}
    config = {"hidden_size": shape.hidden, "vocab_size": shape.vocab_size, FLAGS_KEY: flags}
    return CheckpointLayout(NAME, stored, config)
