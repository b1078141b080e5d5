"""Check of a folder's tensors against those that a format expects.

Names, shapes and dtypes are compared before any weight is read.
"""

import re
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
    """Shape that a tensor must have, and the dtypes that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = WEIGHT_DTYPES


@dataclass(frozen=True)
class TensorClaims:
    """Tensors of a folder by internal name. Invariant: every internal name has one stored tensor."""

    files: TensorFiles
    stored_names: dict[str, str]  # internal name -> stored name

    def __contains__(self, name: str) -> bool:
        return name in self.stored_names

    def require_shape(self, name: str, dims: int) -> tuple[int, ...]:
        """Return the shape of a tensor that must be present with that number of dimensions."""
        if name not in self.stored_names:
            raise self.refuse_missing(name)
        shape = self.files.get_shape(self.stored_names[name])
        if len(shape) != dims:
            raise self.refuse(f"{self.stored_names[name]} is {list(shape)}, and {dims} dimensions are expected")
        return shape

    def count_heads(self, pattern: re.Pattern[str]) -> tuple[int, int]:
        """Count heads, and layers per head, from the names of their tensors.

        Args:
            pattern: Pattern of internal names; its first two groups are the indices of head and layer.

        Raises:
            ForedraftError: if there are too few tensors for these counts.
        """
        found = [match for name in self.stored_names if (match := pattern.match(name))]
        num_heads, num_layers = (1 + max((int(match[group]) for match in found), default=0) for group in (1, 2))
        if num_heads * num_layers > len(self.stored_names):
            raise self.refuse_missing(f"a part of {num_heads} heads of {num_layers} layers")
        return num_heads, num_layers

    def refuse(self, reason: str) -> ForedraftError:
        return self.files.refuse(reason)

    def refuse_missing(self, name: str, hint: str = "the upload is incomplete or of another kind") -> ForedraftError:
        return self.refuse(f"{name} is missing; {hint}")

    def check(self, expected: Mapping[str, ExpectedTensor | tuple[int, ...]]) -> None:
        """Check that the tensors are exactly the expected ones.

        Args:
            expected: Requirement of every tensor by internal name. A plain shape allows any dtype of weights.

        Raises:
            ForedraftError: if a tensor is unexpected, missing, or of another shape or dtype.
        """
        extra = sorted(self.stored_names[name] for name in self.stored_names.keys() - expected.keys())
        if extra:
            quantised = any(name.endswith(("scale", "scales", "zeros", "g_idx", "qweight")) for name in extra)
            cause = "quantised drafters are not supported" if quantised else "it computes something else with it"
            raise self.refuse(f"this format has no place for {extra[0]}{_format_remainder(extra)}; {cause}")
        missing = sorted(expected.keys() - self.stored_names.keys())
        if missing:
            raise self.refuse_missing(f"{missing[0]}{_format_remainder(missing)}")
        for name, requirement in expected.items():
            requirement = requirement if isinstance(requirement, ExpectedTensor) else ExpectedTensor(requirement)
            self._check_tensor(name, requirement)

    def _check_tensor(self, name: str, expected: ExpectedTensor) -> None:
        stored = self.files.stored_tensors[self.stored_names[name]]
        if stored.shape != expected.shape:
            raise self.refuse(
                f"{self.stored_names[name]} is {list(stored.shape)} and has to be {list(expected.shape)}; "
                "the weights and config.json belong to different drafters"
            )
        if stored.dtype not in expected.dtypes:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected.dtypes)
            raise self.refuse(
                f"{self.stored_names[name]} is stored as {str(stored.dtype).removeprefix('torch.')} and has to be "
                f"{kinds}; quantised drafters are not supported"
            )

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read tensors into memory, by internal name. Names that share a stored tensor share the result.

        Args:
            names: Internal names; None = all.
        """
        mapped = self.stored_names if names is None else {name: self.stored_names[name] for name in names}
        tensors = self.files.read(dict.fromkeys(mapped.values()))
        return {name: tensors[stored] for name, stored in mapped.items()}

    def check_target(self, quantity: str, value: int, target_name: str, expected: int) -> None:
        """Check that a size of the drafter is that of the target."""
        if value != expected:
            raise self.refuse(
                f"it is made for a target with {quantity} {value}, and {target_name} has {expected}; use a "
                "drafter for this target"
            )


def _format_remainder(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
