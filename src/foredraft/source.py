"""What an encoder reads: the input of an encoder-decoder model, one per prompt, and a prompt that says it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from torch import Tensor, uint8


@dataclass(frozen=True, eq=False)  # two sources are never the same, however alike
class Source:
    """The n samples of one prompt share it, and whoever keeps what an encoder made of it keeps that weakly by it.

    tokens: ids for an encoder that reads text; drafts may copy from them. features: [S, F] or [F, S] what an encoder of
    sound or the like reads instead, as its own processor gives it. states: [S, H] what one model's encoder made of it
    already; no other model can read those.
    """

    tokens: tuple[int, ...] = ()
    features: Tensor | None = field(default=None, repr=False)
    states: Tensor | None = field(default=None, repr=False)

    @property
    def digest(self) -> bytes:
        """Equal for sources that an encoder makes the same of."""
        made = blake2b(array("q", self.tokens).tobytes(), digest_size=32)
        for numbers in (self.features, self.states):
            if numbers is None:
                continue
            numbers = numbers.detach().cpu().contiguous()
            made.update(repr((numbers.dtype, tuple(numbers.shape))).encode())
            made.update(numbers.view(uint8).numpy().tobytes())
        return made.digest()


@dataclass(frozen=True)
class Begun:
    """A prompt that is read already: what the encoder reads, and the decoder's first tokens."""

    source: Source
    tokens: list[int]


@dataclass(frozen=True)
class Seq2Seq:
    """A prompt of an encoder-decoder model where text alone does not say it all.

    source: what the encoder reads, as text or token ids (ids are taken as they are, with their end token).
    prefix: how the decoder's text begins after its start token, as text or ids: it is given, not generated, and no part
    of the completion. None = what the model's generation_config forces, such as the language of the output.
    features: instead of a source, what an encoder of sound reads, as the model's own processor makes it: a tensor or
    array [mel bins, frames].
    """

    source: str | Sequence[int] = ()
    prefix: str | Sequence[int] | None = None
    features: Any = field(default=None, repr=False)
