"""Inputs of encoder-decoder models: the source that an encoder reads, and prompts with a source."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from torch import Tensor, uint8


@dataclass(frozen=True, eq=False)  # compared by identity
class EncoderSource:
    """Input of an encoder, shared by the n samples of a prompt. Caches of encoder outputs refer to it weakly."""

    tokens: tuple[int, ...] = ()  # token ids for an encoder of text; drafts may copy from them
    # [S, F] or [F, S]: input of an encoder of sound or images, from the processor of the model.
    features: Tensor | None = field(default=None, repr=False)
    # [S, H]: output of the encoder, if it is computed already; valid for this model only.
    states: Tensor | None = field(default=None, repr=False)

    @property
    def digest(self) -> bytes:
        """Hash of the content: equal for sources with equal encoder outputs (32 bytes)."""
        hasher = blake2b(array("q", self.tokens).tobytes(), digest_size=32)
        for tensor in (self.features, self.states):
            if tensor is None:
                continue
            tensor = tensor.detach().cpu().contiguous()
            hasher.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            hasher.update(tensor.view(uint8).numpy().tobytes())
        return hasher.digest()


@dataclass(frozen=True)
class PreparedPrompt:
    """Prompt that is already tokenised: the encoder's source and the decoder's first tokens."""

    source: EncoderSource
    tokens: list[int]


@dataclass(frozen=True)
class Seq2Seq:
    """Prompt of an encoder-decoder model with more than the text of its source.

    Args:
        source: input of the encoder, as text or as token ids that include their end token.
        prefix: first tokens of the decoder after its start token, as text or ids; not part of the completion. Default
            None = the tokens that the model's generation_config forces, such as the language of the output.
        features: input of an encoder of sound instead of a source, from the processor of the model: a tensor or array
            [mel bins, frames]. Default None.
    """

    source: str | Sequence[int] = ()
    prefix: str | Sequence[int] | None = None
    features: Any = field(default=None, repr=False)
