"""Export of an MTP layer into a copy of its target, in the names of the target's family."""

from typing import Any

from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.checkpoints.target import ExportTarget
from foredraft.drafters.mtp.checkpoint import LAYER_PREFIX, NAME
from foredraft.drafters.mtp.shape import MtpShape
from foredraft.drafters.mtp.spellings import Spelling, choose_spelling
from foredraft.errors import ForedraftError
from foredraft.files import hub
from foredraft.files.file_checks import read_json

FILE = "model-mtp.safetensors"


def export_into_target(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export the layer with the target's configuration, which then says that there is one.

    Raises:
        ForedraftError: if engines would compute something else with the layer in this family.
    """
    shape = checkpoint.require_shape(MtpShape, "MTP layer")
    config = read_json(hub.find_folder(target.info.name, ["config.json"]) / "config.json", target.info.name)
    text = config.get("text_config", config)
    spelling = choose_spelling(str(text.get("model_type"))).fill(target.info.num_layers)
    flags = {name: getattr(shape, name) for name in spelling.flags}
    if flags != spelling.flags:
        raise ForedraftError(
            f"{checkpoint.folder} was trained as {flags}, and the family of {target.info.name} means {spelling.flags}; "
            "train it with this target, without --start"
        )
    text[spelling.count_key] = 1
    return CheckpointLayout(NAME, _spell(checkpoint.tensors, spelling), config, FILE), []


def _spell(tensors: dict[str, Tensor], spelling: Spelling) -> dict[str, Tensor]:
    """Return the tensors by their names in the family, with a matrix for each expert."""
    stored: dict[str, Any] = {}
    for name, tensor in tensors.items():
        layer_name = spelling.layer + name.removeprefix(LAYER_PREFIX)
        experts, _, kind = layer_name.rpartition(".")
        if not name.startswith(LAYER_PREFIX):
            stored[spelling.parts[name.removesuffix(".weight")]] = tensor
        elif kind == "gate_up_proj":
            for i, (gate, up) in enumerate(matrices.chunk(2) for matrices in tensor):
                stored |= {f"{experts}.{i}.gate_proj.weight": gate, f"{experts}.{i}.up_proj.weight": up}
        elif kind == "down_proj":
            stored |= {f"{experts}.{i}.down_proj.weight": matrix for i, matrix in enumerate(tensor)}
        else:
            stored[layer_name] = tensor
    return stored
