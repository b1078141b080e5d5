"""The encoder of a pair: transformers' own, over many sources at once where padding costs nothing but time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.models.encdec.native_encoder import NativeEncoder
from foredraft.source import EncoderSource

MAX_PASS_TOKENS = 1 << 14  # tokens of one pass, padding included
EXAMPLE_TOKENS = 64  # tokens of a source that is made up


class SourceEncoder:
    """is_padded: sources of different lengths may share a pass. Without that a source's states do not depend on the
    sources encoded with it, down to their bits."""

    def __init__(self, model: Any, allows_padding: bool, native: NativeEncoder | None = None) -> None:
        self.native = native
        self.module = model.get_encoder()
        self.takes_features = model.main_input_name != "input_ids"
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.allows_padding = allows_padding

    @property
    def feature_shape(self) -> tuple[int, int]:
        """Shape of an audio source, as its processor returns it."""
        stride = self.module.conv1.stride[0] * self.module.conv2.stride[0]
        return int(self.config.num_mel_bins), int(self.config.max_source_positions * stride)

    def check_source(self, source: EncoderSource, name: str) -> None:
        """Raises ForedraftError for a source of another kind than this encoder reads."""
        if self.takes_features:
            shape = self.feature_shape
            if source.features is None:
                raise ForedraftError(f"{name} reads sound: give Seq2Seq(features=...) of shape {list(shape)}")
            if tuple(source.features.shape) != shape:
                found = list(source.features.shape)
                raise ForedraftError(
                    f"{name} takes features of shape {list(shape)}, got {found}; use its own processor"
                )
        elif source.features is not None:
            raise ForedraftError(f"{name} reads text: give a source, not features")

    def make_example(self) -> EncoderSource:
        """A source that means nothing."""
        if self.takes_features:
            return EncoderSource(features=torch.zeros(self.feature_shape))
        return EncoderSource(tokens=(int(self.config.vocab_size > 1),) * EXAMPLE_TOKENS)

    def encode_sources(self, sources: Sequence[EncoderSource]) -> tuple[Tensor, list[int]]:
        """[T, H] the states of every source in turn, and how many each has."""
        found = {i: self._convert_states(s.states) for i, s in enumerate(sources) if s.states is not None}
        unread = [i for i in range(len(sources)) if i not in found]
        if self.native is not None and unread:
            found.update(zip(unread, self.native.encode_sources([sources[i].tokens for i in unread]), strict=True))
        for batch in self._make_batches(sources) if self.native is None else ():
            states = self._encode_features(sources, batch) if self.takes_features else self._encode_text(sources, batch)
            found.update(zip(batch, states, strict=True))
        ordered = [found[i] for i in range(len(sources))]
        return torch.cat(ordered), [len(states) for states in ordered]

    def _make_batches(self, sources: Sequence[EncoderSource]) -> list[list[int]]:
        sizes = [1 if self.takes_features else len(source.tokens) for source in sources]
        unread = [i for i, source in enumerate(sources) if source.states is None]
        if self.takes_features:
            return [[i] for i in unread]
        batches: list[list[int]] = []
        for i in sorted(unread, key=sizes.__getitem__):
            last = batches[-1] if batches else None
            is_alike = last is not None and (self.allows_padding or sizes[last[0]] == sizes[i])
            if last is not None and is_alike and (len(last) + 1) * sizes[i] <= MAX_PASS_TOKENS:
                last.append(i)
            else:
                batches.append([i])
        return batches

    def _convert_states(self, states: Tensor) -> Tensor:
        """Raises ForedraftError for states that another model's encoder made."""
        if states.shape[-1] != self.config.d_model:
            raise ForedraftError(
                f"a source was given as states {states.shape[-1]} wide; this encoder makes {self.config.d_model}; "
                "give the source itself"
            )
        return states.to(self.device, self.dtype if self.native is None else torch.float32)

    def _encode_text(self, sources: Sequence[EncoderSource], batch: Sequence[int]) -> list[Tensor]:
        sizes = [len(sources[i].tokens) for i in batch]
        longest = max(sizes)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, i in enumerate(batch):
            ids[row, : sizes[row]] = torch.tensor(sources[i].tokens)
            mask[row, : sizes[row]] = 1
        is_even = min(sizes) == longest
        given = None if is_even else mask.to(self.device)
        out = self.module(input_ids=ids.to(self.device), attention_mask=given).last_hidden_state
        return [states[:size] for states, size in zip(out, sizes, strict=True)]

    def _encode_features(self, sources: Sequence[EncoderSource], batch: Sequence[int]) -> list[Tensor]:
        rows = [source.features for source in (sources[i] for i in batch)]
        stacked = torch.stack([row for row in rows if row is not None]).to(self.device, self.dtype)
        return list(self.module(stacked).last_hidden_state)
