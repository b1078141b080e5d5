"""Files of a checkpoint: names, shapes and dtypes of its tensors, before any weight is read.

A pickle is opened only by torch's restricted reader, and is memory-mapped. This file does not know what the names mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.files.file_checks import check_regular_file, read_json
from foredraft.files.header import read_header

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHT_FILES = (
    "medusa_lm_head.safetensors",
    "model.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
    "pytorch_model.bin",
)


@dataclass(frozen=True)
class StoredTensor:
    """Tensor as its file declares it. An unsupported dtype keeps its name in the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    mapped: Tensor | None = None  # tensor of a pickle, memory-mapped from the file


@dataclass(frozen=True)
class TensorFiles:
    """Tensors of a checkpoint by stored name. `folder` is the name that the user wrote, for messages."""

    folder: str
    stored_tensors: dict[str, StoredTensor]

    def refuse(self, reason: str) -> ForedraftError:
        return ForedraftError(f"{self.folder}: {reason}")

    def get_shape(self, name: str) -> tuple[int, ...]:
        return self.stored_tensors[name].shape

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors into their own memory, with the stored dtype.

        Raises:
            ForedraftError: if a tensor holds NaN or infinity, or its file is damaged.
        """
        tensors = {}
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.stored_tensors[name].file, []).append(name)
        for file, file_names in by_file.items():
            for name, tensor in self._open(file, file_names):
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    raise self.refuse(f"{name} holds NaN or infinite numbers; the training run that wrote it diverged")
                tensors[name] = tensor
        return tensors

    def _open(self, file: Path, names: list[str]) -> Iterable[tuple[str, Tensor]]:
        if self.stored_tensors[names[0]].mapped is not None:
            for name in names:
                mapped = self.stored_tensors[name].mapped
                assert mapped is not None
                yield name, mapped.clone(memory_format=torch.contiguous_format)
            return
        try:
            with safe_open(file, "pt") as opened:
                for name in names:
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError):
            raise self.refuse(f"{file.name} is damaged; fetch it again") from None


def open_tensors(folder: Path, display_name: str) -> TensorFiles:
    """Return the tensors of a folder, from a sharded index or from the one weight file with a known name.

    Args:
        folder: Folder of the checkpoint.
        display_name: Folder as the user wrote it, for messages.

    Raises:
        ForedraftError: if no weights are found, or the files are damaged.
    """
    for index in INDEX_FILES:
        if (folder / index).exists():
            return TensorFiles(display_name, _read_shards(folder, index, display_name))
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return TensorFiles(display_name, _read_file(folder / name, display_name))
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return TensorFiles(display_name, _read_file(others[0], display_name))
    if others:
        raise ForedraftError(
            f"{display_name} holds {len(others)} safetensors files ({others[0].name}, ...) and no "
            f"{INDEX_FILES[0]} that lists those of one model; fetch the index too"
        )
    unknown = sorted(file.name for kind in ("*.pt", "*.bin", "*.pth") for file in folder.glob(kind))
    hint = f"; {unknown[0]} is not a file that drafters are published in" if unknown else ""
    raise ForedraftError(f"{display_name} holds no weights (model.safetensors, {', '.join(WEIGHT_FILES[2:])}){hint}")


def _read_shards(folder: Path, index: str, display_name: str) -> dict[str, StoredTensor]:
    mapping = read_json(folder / index, display_name).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(file, str) for file in mapping.values()):
        raise ForedraftError(f"{display_name}: {index} has no weight_map; fetch it again")
    shards = {}
    for file in sorted(set(mapping.values())):
        if Path(file).name != file:
            raise ForedraftError(f"{display_name}: {index} points outside the folder ({file!r})")
        if not (folder / file).exists():
            raise ForedraftError(f"{display_name}: {file} is missing, which {index} names; fetch it too")
        shards[file] = _read_file(folder / file, display_name)
    for name, file in mapping.items():
        if name not in shards[file]:
            raise ForedraftError(
                f"{display_name}: {file} does not hold {name}, which {index} says it does; fetch both again"
            )
    return {name: shards[file][name] for name, file in mapping.items()}


def _read_file(file: Path, display_name: str) -> dict[str, StoredTensor]:
    check_regular_file(file, display_name)
    return _read_safetensors(file, display_name) if file.suffix == ".safetensors" else _read_pickle(file, display_name)


def _read_safetensors(file: Path, display_name: str) -> dict[str, StoredTensor]:
    entries = read_header(file, display_name)
    return {
        name: StoredTensor(file, entry.shape, DTYPES.get(entry.dtype, entry.dtype)) for name, entry in entries.items()
    }


def _read_pickle(file: Path, display_name: str) -> dict[str, StoredTensor]:
    try:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):  # files from before torch 1.6 cannot be mapped
                raise
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the reader raises many types
        if "weights only load failed" in str(error).lower() or "unsupported" in str(error).lower():
            raise ForedraftError(
                f"{display_name}: {file.name} is a pickle with more than tensors in it, which could run code; "
                "save the state dict of the model as safetensors"
            ) from None
        raise ForedraftError(f"{display_name}: {file.name} is cut off or not a torch file; fetch it again") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ForedraftError(f"{display_name}: {file.name} is not a flat table of tensors; save the state dict alone")
    return {str(name): StoredTensor(file, tuple(value.shape), value.dtype, value) for name, value in state.items()}
