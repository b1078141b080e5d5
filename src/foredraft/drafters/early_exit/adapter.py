"""Trainable adapter of an early exit: a small gated layer before the target's final norm and output matrix."""

from collections.abc import Mapping

from torch import Tensor

from foredraft.drafters.early_exit.checkpoint import EarlyExitShape
from foredraft.models.hf import HFModel
from foredraft.models.truncated import read_norm_eps
from foredraft.models.truncated_modules import Adapter


class ExitAdapter(Adapter):
    """Adapter for the states of one layer boundary."""

    def __init__(self, shape: EarlyExitShape, target: HFModel) -> None:
        super().__init__(shape.hidden, shape.rank, read_norm_eps(target))
        self.shape = shape

    @classmethod
    def from_tensors(cls, shape: EarlyExitShape, tensors: Mapping[str, Tensor], target: HFModel) -> "ExitAdapter":
        """Make the adapter of a checkpoint's tensors."""
        adapter = cls(shape, target)
        adapter.load_state_dict(dict(tensors))
        return adapter
