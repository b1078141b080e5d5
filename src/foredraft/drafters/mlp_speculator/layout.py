"""Layouts to write: IBM's for one layer per step, Arctic's for an LSTM cell."""

from collections.abc import Mapping

from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.drafters.mlp_speculator import checkpoint, lstm_checkpoint
from foredraft.drafters.mlp_speculator.shape import MlpSpeculatorShape


def make_layout(shape: MlpSpeculatorShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the published names, each tensor once."""
    make = lstm_checkpoint.make_layout if shape.is_lstm else checkpoint.make_layout
    return make(shape, tensors)


def make_export_layout(shape: MlpSpeculatorShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the published names, with the repeats that other programs require."""
    made = make_layout(shape, tensors)
    return lstm_checkpoint.repeat_embeddings(made) if shape.is_lstm else made
