"""What an early exit may learn: a small gated layer before the target's own norm and head."""

from collections.abc import Mapping

from torch import Tensor

from foredraft.checkpoints.base import EarlyExitShape
from foredraft.models.lm import HFModel
from foredraft.models.truncated import Adapter, eps_of


class ExitAdapter(Adapter):
    """For the states of one boundary."""

    def __init__(self, shape: EarlyExitShape, target: HFModel) -> None:
        super().__init__(shape.hidden, shape.rank, eps_of(target))
        self.shape = shape

    @classmethod
    def loaded(cls, shape: EarlyExitShape, tensors: Mapping[str, Tensor], target: HFModel) -> "ExitAdapter":
        made = cls(shape, target)
        made.load_state_dict(dict(tensors))
        return made
