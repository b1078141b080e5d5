"""An encoder-decoder model as the engine sees it: the decoder is an LM whose rows also see their request's source.

A span of a window names its source. The encoder, transformers' own, runs once for each; every decoder layer's keys and
values of it are kept as long as somebody holds the source. The decoder runs by a loop of our own on the same weights:
transformers' forward has no place for the positions of a tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.errors import ForedraftError
from foredraft.kernels.quantize import packers
from foredraft.kv.pool import KVPool
from foredraft.kv.weak import weakly
from foredraft.models import encdec_bart, encdec_t5
from foredraft.models.encdec_attention import Sight
from foredraft.models.encdec_decoder import Product, Stack
from foredraft.models.encdec_encoder import Encoder
from foredraft.models.encdec_fused import FusedPair, why_not
from foredraft.models.encdec_memory import DecoderPool, SourceMemory
from foredraft.models.encdec_native_encoder import NativeEncoder
from foredraft.models.lm import HFModel
from foredraft.models.packed import check, packed
from foredraft.models.support import compare_decoders, examine_pair
from foredraft.models.window import NORMED, Window
from foredraft.source import Source

BOUNDLESS = 1 << 14  # tokens of a text or a source where a model sets no end


@dataclass
class EncoderDecoder(HFModel):
    """T5, BART, Whisper and what is built like them. `pool` is the decoder's; `sources` lies beside it."""

    stack: Stack = field(kw_only=True)
    encoder: Encoder = field(kw_only=True)
    native: FusedPair | None = field(kw_only=True, default=None)
    sources: SourceMemory = field(init=False)
    _measured: Source | None = None

    def __post_init__(self) -> None:
        pool = DecoderPool(self.pool.is_native)
        self.pool = pool
        self.sources = pool.sources = SourceMemory(pool.is_native, weakly(self._read), weakly(pool.limit))

    @classmethod
    def adopt(
        cls, model: Any, name: str, is_fused: bool = False, is_ours: bool = False, quantization: str | None = None
    ) -> "EncoderDecoder":
        """Take over a loaded model; arguments as in HFModel. Raises ForedraftError for one that is built otherwise."""
        model.eval()
        check(model, quantization)
        examine_pair(model, name, (*encdec_t5.FAMILIES, *encdec_bart.FAMILIES))
        count = sum(p.numel() for p in model.parameters())
        family = encdec_t5 if model.config.model_type in encdec_t5.FAMILIES else encdec_bart
        stack = family.stack(model, lambda modules: Product(modules, is_ours=False))
        compare_decoders(model, name, partial(_logits, stack, model.dtype))
        why, fused, reader = why_not(model, stack), None, None
        if quantization is not None and why is not None:
            raise ForedraftError(f"{name} cannot be quantised: it cannot run as native code ({why})")
        if why is None and (is_fused or quantization is not None):
            fused = FusedPair.of(model, stack, *packers(quantization), is_ours)
            reader = NativeEncoder.of(model, stack.shape, packers(quantization)[0], is_ours)
            if is_ours and reader is None:
                packed(model.get_encoder(), quantization, True)
        elif is_ours:
            stack = family.stack(model, lambda modules: Product(modules, is_ours=True))
        is_native = fused is not None
        # a token of KV memory is one of the text and one of a source
        numbers = 4 * len(stack.blocks) * stack.shape.heads * stack.shape.head_dim
        encoder = Encoder(model, is_padded=not is_native, native=reader)
        return cls(model, name, KVPool(is_native), numbers, count, stack=stack, encoder=encoder, native=fused)

    def sibling(self) -> "EncoderDecoder":
        return replace(self)

    @property
    def vocab_size(self) -> int:
        return len(self.stack.head.product.dense)

    @property
    def own_context_length(self) -> int:
        """Tokens the decoder's text may have."""
        return encdec_bart.num_positions(self.model) if self.stack.biases is None else BOUNDLESS

    @property
    def source_length(self) -> int:
        """Tokens a source may have."""
        return encdec_bart.source_positions(self.model) if self.stack.biases is None else BOUNDLESS

    @property
    def num_layers(self) -> int:
        return len(self.stack.blocks)

    @property
    def embedding(self) -> Tensor:
        return self.model.get_decoder().embed_tokens.weight.detach()  # type: ignore[no-any-return]

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.d_model)

    def head(self, hidden: Tensor) -> Tensor:
        logits = self.stack.head(hidden.flatten(0, -2))
        return logits.to(hidden.dtype).view(*hidden.shape[:-1], self.vocab_size)

    @property
    def has_encoder(self) -> bool:
        return True

    @property
    def measured_source(self) -> Source:
        """A source of ordinary length, for passes that measure."""
        if self._measured is None:
            self._measured = self.encoder.example()
        return self._measured

    @torch.no_grad()
    def forward(self, window: Window, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """As of any LM. Raises ForedraftError for a span without a source."""
        for tap in taps:
            if tap != NORMED and not 0 <= tap <= self.num_layers:
                raise ForedraftError(f"tap {tap} is not a boundary of {self.name}: it has {self.num_layers} layers")
        given = [span.source for span in window.spans if span.source is not None]
        if len(given) < len(window.spans):
            raise ForedraftError(f"{self.name} is an encoder-decoder model: every request needs a source")
        places = self.sources.places(given)
        stack, dtype, tokens, positions = self.stack, self.model.dtype, window.tokens[0], window.positions[0]
        if self.native is not None:
            inputs = stack.embed(tokens, positions)
            logits, features = self.native.forward(window, inputs, self.pool, self.sources, places, taps)
        else:
            sight = Sight(stack.shape, window, self.pool, self.sources, places, stack.biases, dtype)
            logits, features = stack.forward(tokens, positions, sight.own, sight.cross, taps, window.logit_rows)
        return logits, None if features is None else features.to(dtype)

    def _read(self, sources: Sequence[Source]) -> tuple[list[tuple[Tensor, Tensor]], list[int]]:
        """Keys and values of every layer [T, H, D] of the sources in turn, and their lengths."""
        states, lengths = self.encoder.states(sources)
        if self.native is not None:
            return self.native.read(states), lengths
        sizes = (2, self.stack.shape.heads, self.stack.shape.head_dim)
        dtype, made = self.model.dtype, []
        for block in self.stack.blocks:
            keys, values = block.cross_kv(states).to(dtype).view(-1, *sizes).unbind(1)
            made.append((keys, values))
        return made, lengths


def _logits(stack: Stack, dtype: torch.dtype, tokens: Tensor, states: Tensor) -> Tensor:
    """[T, V] of a text [T] over a source whose states [S, H] are given, in one pass and without memory."""
    shape, count = stack.shape, len(tokens)
    positions = torch.arange(count, device=tokens.device)
    unseen = torch.full((count, count), -torch.inf, dtype=dtype, device=tokens.device).triu(1)

    def own(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = unseen
        if stack.biases is not None:
            table = stack.biases[layer if len(stack.biases) > 1 else 0].to(dtype)
            distance = (positions[:, None] - positions[None]).clamp(0, len(table) - 1)
            mask = mask + table[distance].permute(2, 0, 1)
        return _attention(q, k, v, mask, shape.scale)

    def cross(layer: int, q: Tensor) -> Tensor:
        k, v = stack.blocks[layer].cross_kv(states).view(-1, 2, shape.heads, shape.head_dim).unbind(1)
        return _attention(q, k, v, None, shape.scale)

    return stack.forward(tokens, positions, own, cross, (), positions)[0]


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1).flatten(1)
