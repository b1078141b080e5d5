"""Drafter of a small model beside the model that was grown from it."""

from dataclasses import replace

from torch import Tensor

from foredraft.drafters.interface import Drafter
from foredraft.drafters.wrapper import DrafterWrapper
from foredraft.path_features import PathFeatures
from foredraft.request import Batch
from foredraft.tree import Commit


class NarrowFeatures(DrafterWrapper):
    """Drafter that sees the leading coordinates of every hidden state.

    In a grown model these coordinates are the hidden state of the small model, and all others are zero. A head of the
    small model therefore drafts the same tokens beside both.

    Args:
        drafter: drafter of the small model.
        width: hidden size of the small model.
    """

    def __init__(self, drafter: Drafter, width: int) -> None:
        super().__init__(drafter)
        self.width = width

    def observe(self, batch: Batch, commit: Commit) -> None:
        if commit.features is not None:
            narrow = select_leading(commit.features, len(self.spec.hidden_layers), self.width)
            commit = replace(commit, path_features=PathFeatures.from_padded(narrow, commit.counts))
        self.drafter.observe(batch, commit)


def select_leading(features: Tensor, num_layers: int, width: int) -> Tensor:
    """Select the leading `width` coordinates of each of the hidden states in `features` [B, P, F].

    Returns [B, P, num_layers * width].
    """
    states = features.view(*features.shape[:-1], num_layers, -1)  # [B, P, layers, hidden size]
    return states[..., :width].flatten(-2)
