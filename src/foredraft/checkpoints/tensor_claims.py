"""Check of the tensors in a folder against those a format expects: names and shapes, before a weight is read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.checkpoints.tensors import TensorFiles
from foredraft.errors import ForedraftError

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGER_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class ExpectedTensor:
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = WEIGHT_DTYPES


@dataclass(frozen=True)
class TensorClaims:
    """The tensors of a folder under our names. Invariant: one stored tensor for each name."""

    files: TensorFiles
    stored_names: dict[str, str]  # ours -> as stored

    def __contains__(self, name: str) -> bool:
        return name in self.stored_names

    def require_shape(self, name: str, dims: int) -> tuple[int, ...]:
        """The shape of a tensor that has to be there with that many dimensions."""
        if name not in self.stored_names:
            raise self.refuse_missing(name)
        shape = self.files.get_shape(self.stored_names[name])
        if len(shape) != dims:
            raise self.refuse(f"{self.stored_names[name]} is {list(shape)}, and {dims} dimensions are expected")
        return shape

    def refuse(self, reason: str) -> ForedraftError:
        return self.files.refuse(reason)

    def refuse_missing(self, name: str, hint: str = "the upload is incomplete or of another kind") -> ForedraftError:
        return self.refuse(f"{name} is missing; {hint}")

    def check(self, expected: Mapping[str, ExpectedTensor | tuple[int, ...]]) -> None:
        """Nothing left over, nothing missing, nothing of another shape or of a dtype that holds no weights."""
        extra = sorted(self.stored_names[name] for name in self.stored_names.keys() - expected.keys())
        if extra:
            quantised = any(name.endswith(("scale", "scales", "zeros", "g_idx", "qweight")) for name in extra)
            cause = "quantised drafters are not supported" if quantised else "it computes something else with it"
            raise self.refuse(f"this format has no place for {extra[0]}{_format_remainder(extra)}; {cause}")
        missing = sorted(expected.keys() - self.stored_names.keys())
        if missing:
            raise self.refuse_missing(f"{missing[0]}{_format_remainder(missing)}")
        for name, want in expected.items():
            want = want if isinstance(want, ExpectedTensor) else ExpectedTensor(want)
            self._check_tensor(name, want)

    def _check_tensor(self, name: str, expected: ExpectedTensor) -> None:
        held = self.files.stored_tensors[self.stored_names[name]]
        if held.shape != expected.shape:
            raise self.refuse(
                f"{self.stored_names[name]} is {list(held.shape)} and has to be {list(expected.shape)}; "
                "the weights and config.json belong to different drafters"
            )
        if held.dtype not in expected.dtypes:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected.dtypes)
            raise self.refuse(
                f"{self.stored_names[name]} is stored as {str(held.dtype).removeprefix('torch.')} and has to be "
                f"{kinds}; "
                "quantised drafters are not supported"
            )

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Every tensor or those named, under our names. Names that share a stored tensor share it here."""
        wanted = self.stored_names if names is None else {name: self.stored_names[name] for name in names}
        held = self.files.read(dict.fromkeys(wanted.values()))
        return {name: held[stored] for name, stored in wanted.items()}

    def check_target(self, quantity: str, value: int, target_name: str, expected: int) -> None:
        """A size that the target dictates."""
        if value != expected:
            raise self.refuse(
                f"it is made for a target with {quantity} {value}, and {target_name} has {expected}; use a "
                "drafter for this target"
            )


def _format_remainder(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
