"""Interface of a drafter in training, and the declaration of its needs and abilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.drafters.joint_training import JointTraining
from foredraft.drafters.losses import Losses, Trace

NOT_TRAINABLE = "; it cannot be trained on"  # end of the error for a checkpoint of another method


@dataclass(frozen=True)
class OnPolicyTraining:
    """Training on sequences that the draft model writes.

    Attributes:
        share: share of the steps on such sequences, 0 to 1.
        make_policy: makes a transformers model with the current weights, to sample from.
    """

    share: float
    make_policy: Callable[[], Any]


@dataclass(frozen=True)
class TraineeSpec:
    """Needs and abilities of a drafter in training.

    Attributes:
        hidden_layers: layer boundaries of the target whose states the trace has, numbered as in `HFModel.forward`.
            Default () = none.
        prepare: function that gets [V] int64: how often each token is learnt. Called once, before the first step of a
            new drafter. Default None.
        finish: function that gets traces of held-out documents. Called before every publication, if there are any.
            Default None.
        save: function that writes the drafter's own files into a folder. Default None = `Trainee.to_checkpoint` is
            written.
        joint: how the target is trained too. Default None = it is frozen.
        on_policy: how the draft model writes its own training data. Default None = it does not.
    """

    hidden_layers: tuple[int, ...] = ()
    prepare: Callable[[Tensor], None] | None = None
    finish: Callable[[Sequence[Trace]], None] | None = None
    save: Callable[[Path], None] | None = None
    joint: JointTraining | None = None
    on_policy: OnPolicyTraining | None = None


class Trainee(Protocol):
    """Drafter in training."""

    @property
    def spec(self) -> TraineeSpec:
        """Needs and abilities; the same during a run."""

    @property
    def network(self) -> nn.Module:
        """Module to train; parameters that require no gradient stay as they are."""

    def compute_loss(self, trace: Trace) -> Losses:
        """Compute the loss of one batch."""

    def to_checkpoint(self) -> CheckpointLayout:
        """Return tensors and config.json in the layout of published checkpoints, without the name of the target."""
