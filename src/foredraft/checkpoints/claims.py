"""What a format expects against what a folder holds, by name and shape, before a weight is read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.checkpoints.tensors import TensorFiles
from foredraft.errors import ForedraftError

WEIGHTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Expected:
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = WEIGHTS


@dataclass(frozen=True)
class Claims:
    """The tensors of a folder under our names. Invariant: one stored tensor for each name."""

    files: TensorFiles
    stored: dict[str, str]  # ours -> as stored

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """The shape of a tensor that has to be there with that many dimensions."""
        if name not in self.stored:
            raise self.missing(name)
        shape = self.files.shape(self.stored[name])
        if len(shape) != dims:
            raise self.refuse(f"{self.stored[name]} is {list(shape)}, and {dims} dimensions are expected")
        return shape

    def refuse(self, what: str) -> ForedraftError:
        return self.files.refuse(what)

    def missing(self, name: str, hint: str = "the upload is incomplete or of another kind") -> ForedraftError:
        return self.refuse(f"{name} is missing; {hint}")

    def check(self, expected: Mapping[str, Expected | tuple[int, ...]]) -> None:
        """Nothing left over, nothing missing, nothing of another shape or of a dtype that holds no weights."""
        extra = sorted(self.stored[name] for name in self.stored.keys() - expected.keys())
        if extra:
            quantised = any(name.endswith(("scale", "scales", "zeros", "g_idx", "qweight")) for name in extra)
            cause = "quantised drafters are not supported" if quantised else "it computes something else with it"
            raise self.refuse(f"this format has no place for {extra[0]}{_and_more(extra)}; {cause}")
        missing = sorted(expected.keys() - self.stored.keys())
        if missing:
            raise self.missing(f"{missing[0]}{_and_more(missing)}")
        for name, want in expected.items():
            want = want if isinstance(want, Expected) else Expected(want)
            self._check(name, want)

    def _check(self, name: str, want: Expected) -> None:
        held = self.files.stored[self.stored[name]]
        if held.shape != want.shape:
            raise self.refuse(
                f"{self.stored[name]} is {list(held.shape)} and has to be {list(want.shape)}; "
                "the weights and config.json belong to different drafters"
            )
        if held.dtype not in want.dtypes:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in want.dtypes)
            raise self.refuse(
                f"{self.stored[name]} is stored as {str(held.dtype).removeprefix('torch.')} and has to be {kinds}; "
                "quantised drafters are not supported"
            )

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Every tensor or those named, under our names. Names that share a stored tensor share it here."""
        wanted = self.stored if names is None else {name: self.stored[name] for name in names}
        held = self.files.read(dict.fromkeys(wanted.values()))
        return {name: held[stored] for name, stored in wanted.items()}

    def check_target(self, what: str, found: int, of: str, expected: int) -> None:
        """A size that the target dictates."""
        if found != expected:
            raise self.refuse(
                f"it is made for a target with {what} {found}, and {of} has {expected}; use a drafter for this target"
            )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
