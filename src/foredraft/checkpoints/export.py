"""Export of a drafter in the layout of another engine.

Anything that an engine would misread or silently drop is refused. Statements about engines were checked in the sources
of vLLM 0.32 and SGLang 0.5.23.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from foredraft.checkpoints import eagle, eagle3, hydra, medusa, mlp_speculator
from foredraft.checkpoints.export_eagle import export_eagle_sglang, export_eagle_vllm
from foredraft.checkpoints.export_eagle3 import export_portable, export_sglang, export_speculators, export_vllm
from foredraft.checkpoints.layouts import CheckpointLayout, make_layout
from foredraft.checkpoints.read import TITLES
from foredraft.checkpoints.schema import Checkpoint, HydraShape
from foredraft.checkpoints.target import ExportTarget
from foredraft.checkpoints.target_reference import describe_target
from foredraft.checkpoints.tensors import INDEX_FILES, WEIGHT_FILES
from foredraft.checkpoints.write import save
from foredraft.errors import ForedraftError
from foredraft.models.draft_layer import make_default_rope

Exporter = Callable[[Checkpoint, ExportTarget], tuple[CheckpointLayout, list[str]]]
FORMATS = ("eagle3", "speculators", "medusa", "mlp_speculator", "hydra", "vllm", "sglang")
COMMAND_DRAFT_TOKENS = 3  # draft length in the commands shown, as in the examples of the engines' documentation


@dataclass(frozen=True)
class ExportResult:
    """Notes on an exported folder, and the command that serves it."""

    notes: tuple[str, ...]  # limits of the exported folder, for the user
    command: str | None  # shell command; None = no engine serves this format


def export(
    checkpoint: Checkpoint, fmt: str, out: str | Path, target: ExportTarget, is_forced: bool = False
) -> ExportResult:
    """Write a drafter into a folder in the format of another engine.

    Args:
        checkpoint: Drafter that was read.
        fmt: One of FORMATS.
        out: Folder to write to.
        target: Target of the drafter.
        is_forced: Whether files in `out` may be overwritten.

    Raises:
        ForedraftError: if the format or its engine cannot represent the drafter, or the folder cannot be written.
    """
    routes = EXPORTERS.get(checkpoint.method, {})
    if not routes:
        raise ForedraftError(f"{checkpoint.folder} holds {TITLES[checkpoint.method]}, which no other engine loads")
    if fmt not in routes:
        reason = UNSUPPORTED_REASONS.get((checkpoint.method, fmt), f"{fmt} is no format for it")
        raise ForedraftError(
            f"{checkpoint.folder} holds {TITLES[checkpoint.method]}: {reason}; use --format {' or '.join(routes)}"
        )
    layout, notes = routes[fmt](checkpoint, target)
    _check_folder(Path(out), layout.file, is_forced)
    save(
        out,
        layout,
        describe_target(target.info.name),
        "give --out a folder with more room; its previous files are still there",
    )
    make_command = SERVE_COMMANDS.get((checkpoint.method, fmt))
    return ExportResult(tuple(notes), make_command and make_command(target.info.name, str(out), checkpoint.method))


def _check_folder(out: Path, file: str, is_forced: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ForedraftError(f"{out} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()) and not is_forced:
        raise ForedraftError(f"{out} is not empty; give another folder, or --force to overwrite its files")
    other_files = [name for name in _list_weight_files(out) if name != file]
    if other_files:
        raise ForedraftError(
            f"{out} holds other weights ({other_files[0]}) that engines would load too; give another folder"
        )


def _list_weight_files(folder: Path) -> Iterable[str]:
    names = {*INDEX_FILES, *WEIGHT_FILES, *(file.name for file in folder.glob("*.safetensors"))}
    return sorted(name for name in names if (folder / name).exists())


def _export_medusa(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    return make_layout(checkpoint.shape, checkpoint.tensors), ["SGLang loads no Medusa heads; vLLM and TGI do"]


def _export_medusa_vllm(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export with vLLM's names, and declare counts and biases under vLLM's keys: it drops undeclared biases."""
    layout = make_layout(checkpoint.shape, checkpoint.tensors)
    size = layout.config["vocab_size"]
    heads, layers = layout.config.pop("medusa_num_heads"), layout.config.pop("medusa_num_layers")
    if layout.config.pop("version", None) is not None:
        raise ForedraftError(
            f"{checkpoint.folder} uses the target's lm_head, and vLLM loads a matrix for every Medusa head; "
            "train heads with matrices of their own for it"
        )
    tensors = {}
    for name, value in layout.tensors.items():
        head, layer, suffix = name.split(".", 2)
        is_output = suffix == "weight"
        vllm_name = (
            f"lm_heads.{head}.weight" if is_output else f"blocks.{head}.layers.{layer}.{suffix.removeprefix('linear.')}"
        )
        tensors[vllm_name] = value
    config = layout.config | {"num_heads": heads, "num_hidden_layers": layers, "truncated_vocab_size": size}
    return CheckpointLayout(layout.method, tensors, config), [
        "vLLM drafts a chain of the likeliest token of every head, no tree"
    ]


def _export_mlp_speculator(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    notes = ["neither vLLM nor SGLang loads MLP speculators now; TGI and Arctic Inference do"]
    return make_layout(checkpoint.shape, checkpoint.tensors), notes


def _export_hydra(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    if checkpoint.format != "Hydra":
        raise ForedraftError(
            f"{checkpoint.folder} has heads in a form of this project, and the authors' code would leave the missing "
            "tensors at random; train with --set own_head=true --set rank=None for it"
        )
    assert isinstance(checkpoint.shape, HydraShape)
    prefix = checkpoint.shape.prefix
    if prefix is not None and prefix.rope != make_default_rope():
        raise ForedraftError(
            f"{checkpoint.folder} has a prefix layer with the rotary parameters {prefix.rope}, and the authors' code "
            "supports only base 10000; train new heads for it"
        )
    return make_layout(checkpoint.shape, checkpoint.tensors), ["neither vLLM nor SGLang loads Hydra heads"]


def _make_vllm_command(target: str, out: str, method: str) -> str:
    config = json.dumps({"method": method, "model": out, "num_speculative_tokens": COMMAND_DRAFT_TOKENS})
    return f"vllm serve {target} --speculative-config '{config}'"


def _make_speculators_command(target: str, out: str, method: str) -> str:
    return f"vllm serve {out}"


def _make_sglang_command(target: str, out: str, method: str) -> str:
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method.upper()} "
        f"--speculative-draft-model-path {out} --speculative-num-steps {COMMAND_DRAFT_TOKENS} "
        "--speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {COMMAND_DRAFT_TOKENS + 1}"
    )


EXPORTERS: dict[str, dict[str, Exporter]] = {
    eagle3.METHOD: {
        "eagle3": export_portable,
        "speculators": export_speculators,
        "vllm": export_vllm,
        "sglang": export_sglang,
    },
    eagle.METHOD: {"vllm": export_eagle_vllm, "sglang": export_eagle_sglang},
    medusa.METHOD: {"medusa": _export_medusa, "vllm": _export_medusa_vllm},
    mlp_speculator.METHOD: {"mlp_speculator": _export_mlp_speculator},
    hydra.METHOD: {"hydra": _export_hydra},
}
UNSUPPORTED_REASONS = {
    (medusa.METHOD, "sglang"): "SGLang loads no Medusa heads",
    (mlp_speculator.METHOD, "vllm"): "vLLM has its MLP speculator switched off",
    (mlp_speculator.METHOD, "sglang"): "SGLang loads no MLP speculators",
    (hydra.METHOD, "vllm"): "vLLM loads no Hydra heads",
    (hydra.METHOD, "sglang"): "SGLang loads no Hydra heads",
}
SERVE_COMMANDS = {
    (eagle3.METHOD, "eagle3"): _make_vllm_command,
    (eagle3.METHOD, "vllm"): _make_vllm_command,
    (eagle3.METHOD, "speculators"): _make_speculators_command,
    (eagle3.METHOD, "sglang"): _make_sglang_command,
    (eagle.METHOD, "vllm"): _make_vllm_command,
    (eagle.METHOD, "sglang"): _make_sglang_command,
    (medusa.METHOD, "medusa"): _make_vllm_command,
    (medusa.METHOD, "vllm"): _make_vllm_command,
}
