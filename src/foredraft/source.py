"""What an encoder reads: the input of an encoder-decoder model, one per prompt."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)  # two sources are never the same, however alike
class Source:
    """The n samples of one prompt share it, and whoever keeps what an encoder made of it keeps that weakly by it.

    tokens: ids for an encoder that reads text; drafts may copy from them. features: [S, F] or [F, S] what an encoder of
    sound or the like reads instead, as its own processor gives it.
    """

    tokens: tuple[int, ...] = ()
    features: Tensor | None = field(default=None, repr=False)
