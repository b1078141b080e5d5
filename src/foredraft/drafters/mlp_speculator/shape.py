"""Shape of an MLP speculator: what its folder determines."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MlpSpeculatorShape:
    """Shape of an MLP speculator.

    Tensors: `emb.{i}.weight` [V, inner], `proj.{i}.weight` [inner, H or inner], `ln.{i}.weight` and `.bias` [inner],
    `head.{i}.weight` [V, inner]. With tied weights only step 0 is stored, and step 1 of proj.

    With an LSTM cell, whose steps are always tied: `forget_emb.0.weight` [V, inner], `{gate}_proj.{0,1}.weight`
    [inner, H or inner] of the gates forget, input, output and cell, `cell_ln.0` and `state_ln.0`, `head.0.weight`.
    """

    hidden: int
    inner: int
    vocab_size: int
    n_predict: int
    is_tied: bool = False
    scales_input: bool = False
    branching: tuple[int, ...] | None = None  # top_k_tokens_per_head
    candidates: int | None = None  # n_candidates: paths of the tree that are verified; None = all
    is_lstm: bool = False  # the state passes through an LSTM cell (Arctic) instead of one layer
