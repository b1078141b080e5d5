"""Encoder of encoder-decoder models: runs transformers' module or native code over several sources.

It returns encoder states. Cross-attention KV is computed from them elsewhere.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.models.encdec.native_encoder import NativeEncoder
from foredraft.source import EncoderSource

MAX_PASS_TOKENS = 1 << 14  # maximum number of tokens of one forward pass, padding included
EXAMPLE_TOKENS = 64  # tokens of an example source


class SourceEncoder:
    """Encoder of a model.

    Args:
        model: transformers encoder-decoder model.
        allows_padding: whether sources of different lengths may share a forward pass of transformers' module. Without
            padding the states of a source do not depend on the sources encoded with it, in any bit.
        native: native encoder for text. Default None = transformers' module.
    """

    def __init__(self, model: Any, allows_padding: bool, native: NativeEncoder | None = None) -> None:
        self.native = native
        self.module = model.get_encoder()
        self.takes_features = model.main_input_name != "input_ids"
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.allows_padding = allows_padding

    @property
    def feature_shape(self) -> tuple[int, int]:
        """Shape of an audio source from the model's processor: [mel bins, frames]."""
        stride = self.module.conv1.stride[0] * self.module.conv2.stride[0]
        return int(self.config.num_mel_bins), int(self.config.max_source_positions * stride)

    def check_source(self, source: EncoderSource, name: str) -> None:
        """Check that a source is of the kind that this encoder reads, text or audio.

        Args:
            source: source of a request.
            name: name of the model in errors.

        Raises:
            ForedraftError: the source is of the other kind, or its features have another shape.
        """
        if self.takes_features:
            shape = self.feature_shape
            if source.features is None:
                raise ForedraftError(f"{name} reads audio: give Seq2Seq(features=...) of shape {list(shape)}")
            if tuple(source.features.shape) != shape:
                actual = list(source.features.shape)
                raise ForedraftError(
                    f"{name} takes features of shape {list(shape)}, got {actual}; use its own processor"
                )
        elif source.features is not None:
            raise ForedraftError(f"{name} reads text: give a source, not features")

    def make_example(self) -> EncoderSource:
        """Make a source of ordinary length without meaning, for measurements."""
        if self.takes_features:
            return EncoderSource(features=torch.zeros(self.feature_shape))
        return EncoderSource(tokens=(int(self.config.vocab_size > 1),) * EXAMPLE_TOKENS)

    def encode_sources(self, sources: Sequence[EncoderSource]) -> tuple[Tensor, list[int]]:
        """Encode sources that have no states yet.

        Returns:
            States [T, H] of all sources, concatenated in their order, and the number of states of each source.
        """
        states_by_index = {i: self._convert_states(s.states) for i, s in enumerate(sources) if s.states is not None}
        unencoded = [i for i in range(len(sources)) if i not in states_by_index]
        if self.native is not None and unencoded:
            states_by_index.update(
                zip(unencoded, self.native.encode_sources([sources[i].tokens for i in unencoded]), strict=True)
            )
        for batch in self._make_batches(sources) if self.native is None else ():
            states = self._encode_features(sources, batch) if self.takes_features else self._encode_text(sources, batch)
            states_by_index.update(zip(batch, states, strict=True))
        states_in_order = [states_by_index[i] for i in range(len(sources))]
        return torch.cat(states_in_order), [len(states) for states in states_in_order]

    def _make_batches(self, sources: Sequence[EncoderSource]) -> list[list[int]]:
        """Group the indices of sources without states into forward passes. Audio sources are encoded one by one."""
        sizes = [1 if self.takes_features else len(source.tokens) for source in sources]
        unencoded = [i for i, source in enumerate(sources) if source.states is None]
        if self.takes_features:
            return [[i] for i in unencoded]
        batches: list[list[int]] = []
        for i in sorted(unencoded, key=sizes.__getitem__):
            last = batches[-1] if batches else None
            is_compatible = last is not None and (self.allows_padding or sizes[last[0]] == sizes[i])
            if last is not None and is_compatible and (len(last) + 1) * sizes[i] <= MAX_PASS_TOKENS:
                last.append(i)
            else:
                batches.append([i])
        return batches

    def _convert_states(self, states: Tensor) -> Tensor:
        """Convert states that the caller computed. Raises ForedraftError if their width is another model's."""
        if states.shape[-1] != self.config.d_model:
            raise ForedraftError(
                f"a source has states of width {states.shape[-1]}, and this encoder has width {self.config.d_model}; "
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
        padding_mask = None if is_even else mask.to(self.device)
        out = self.module(input_ids=ids.to(self.device), attention_mask=padding_mask).last_hidden_state
        return [states[:size] for states, size in zip(out, sizes, strict=True)]

    def _encode_features(self, sources: Sequence[EncoderSource], batch: Sequence[int]) -> list[Tensor]:
        rows = [source.features for source in (sources[i] for i in batch)]
        stacked = torch.stack([row for row in rows if row is not None]).to(self.device, self.dtype)
        return list(self.module(stacked).last_hidden_state)
