"""Encoder-decoder models as LMs: the decoder is the LM, and its rows also attend to the source of their request.

Every span of a forward batch has a source. The encoder runs once per source, and the cross-attention KV of all layers
is cached as long as the source is referenced. The decoder runs in our own loop on the model's weights, since
transformers' forward does not accept the positions of a token tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.errors import ForedraftError
from foredraft.kernels.quantize import select_packers
from foredraft.kv.pool import KVPool
from foredraft.kv.weak import bind_weakly
from foredraft.models.compatibility import compare_decoders, examine_encoder_decoder
from foredraft.models.encdec import bart, t5
from foredraft.models.encdec.attention import Seq2SeqAttention
from foredraft.models.encdec.cross_kv import CrossKVCache, DecoderKVPool
from foredraft.models.encdec.decoder import DecoderStack, MergedLinear
from foredraft.models.encdec.encoder import SourceEncoder
from foredraft.models.encdec.native_decoder import NativeSeq2SeqDecoder, explain_unsupported
from foredraft.models.encdec.native_encoder import NativeEncoder
from foredraft.models.exact import make_exact_error
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch
from foredraft.models.hf import HFModel
from foredraft.models.packed_linear import check_quantizable, pack_linears
from foredraft.source import EncoderSource

UNLIMITED_LENGTH = 1 << 14  # tokens of a sequence or a source, for a model without a limit
KV_TENSORS_PER_LAYER = 4  # keys and values of self-attention and of cross-attention


@dataclass
class EncoderDecoder(HFModel):
    """T5, BART, Whisper or a model of a similar family. `pool` holds the self-attention KV of the decoder."""

    decoder: DecoderStack = field(kw_only=True)
    encoder: SourceEncoder = field(kw_only=True)
    native: NativeSeq2SeqDecoder | None = field(kw_only=True, default=None)  # used instead of `decoder`'s loop
    cross_kv: CrossKVCache = field(init=False)  # cross-attention KV, cleared together with `pool`
    _calibration_source: EncoderSource | None = None

    def __post_init__(self) -> None:
        pool = DecoderKVPool(self.pool.is_native, is_whole=self.pool.is_whole)
        self.pool = pool
        super().__post_init__()
        self.cross_kv = pool.cross_kv = CrossKVCache(
            pool.is_native, bind_weakly(self._encode_cross_kv), bind_weakly(pool.get_capacity)
        )

    @classmethod
    def wrap_model(
        cls,
        model: Any,
        name: str,
        is_fused: bool = False,
        is_owned: bool = False,
        quantization: str | None = None,
        sharer: HFModel | None = None,
        is_exact: bool = False,
    ) -> "EncoderDecoder":
        """Wrap a loaded model; arguments as in HFModel.wrap_model.

        Raises:
            ForedraftError: the model is of an unsupported family, cannot be quantised or exact, or `sharer` is given.
        """
        if sharer is not None:
            raise ForedraftError(f"{name} has an encoder, and shares no weights; load it without shares_weights_of")
        model.eval()
        check_quantizable(model, quantization)
        examine_encoder_decoder(model, name, (*t5.FAMILIES, *bart.FAMILIES))
        count = sum(p.numel() for p in model.parameters())
        family = t5 if model.config.model_type in t5.FAMILIES else bart
        stack = family.build_decoder(model, lambda modules: MergedLinear(modules, is_owned=False))
        compare_decoders(model, name, partial(_compute_logits, stack, model.dtype))
        reason, fused, native_encoder = explain_unsupported(model, stack), None, None
        if quantization is not None and reason is not None:
            raise ForedraftError(f"{name} cannot be quantised: it cannot run as native code ({reason})")
        if reason is None and (is_fused or quantization is not None):
            fused = NativeSeq2SeqDecoder.from_decoder(model, stack, *select_packers(quantization), is_owned)
            native_encoder = NativeEncoder.from_model(model, stack.shape, select_packers(quantization)[0], is_owned)
            if is_owned and native_encoder is None:
                pack_linears(model.get_encoder(), quantization, True)
        elif is_owned:
            stack = family.build_decoder(model, lambda modules: MergedLinear(modules, is_owned=True))
        is_native = fused is not None
        # One token of KV capacity is one decoder token and one source token.
        kv_elements = KV_TENSORS_PER_LAYER * len(stack.blocks) * stack.shape.heads * stack.shape.head_dim
        if is_exact and native_encoder is None:
            raise make_exact_error(name, "its encoder and decoder do not both run as native code on the CPU")
        encoder = SourceEncoder(model, allows_padding=not is_native, native=native_encoder)
        pool = KVPool(is_native, is_whole=model.device.type == "cuda")
        return cls(model, name, pool, kv_elements, count, decoder=stack, encoder=encoder, native=fused)

    def with_new_kv(self) -> "EncoderDecoder":
        return replace(self)

    @property
    def adapter_obstacle(self) -> str | None:
        """Reason why requests cannot have adapters of their own."""
        return "it has an encoder"

    @property
    def vocab_size(self) -> int:
        return len(self.decoder.head.linear.dense_weight)

    @cached_property
    def model_context_length(self) -> int:
        """Limit of the decoder's sequence in tokens."""
        return bart.num_positions(self.model) if self.decoder.position_biases is None else UNLIMITED_LENGTH

    @property
    def source_length(self) -> int:
        """Maximum number of tokens of a source."""
        return bart.num_source_positions(self.model) if self.decoder.position_biases is None else UNLIMITED_LENGTH

    @property
    def num_layers(self) -> int:
        return len(self.decoder.blocks)

    @property
    def embedding(self) -> Tensor:
        return self.model.get_decoder().embed_tokens.weight.detach()  # type: ignore[no-any-return]

    @property
    def head_weight(self) -> Tensor:
        """Matrix [V, H] that makes logits from states after the final norm, in their dtype."""
        head = self.decoder.head
        return head.linear.dense_weight * head.scale

    @property
    def head_bias(self) -> Tensor | None:
        return self.decoder.head.bias

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.d_model)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = self.decoder.head(hidden.flatten(0, -2))
        return logits.to(hidden.dtype).view(*hidden.shape[:-1], self.vocab_size)

    @property
    def runs_native(self) -> bool:
        return self.native is not None

    @property
    def is_exact(self) -> bool:
        return self.native is not None and self.encoder.native is not None

    @property
    def has_encoder(self) -> bool:
        return True

    @property
    def calibration_source(self) -> EncoderSource:
        """Source of ordinary length for measuring passes."""
        if self._calibration_source is None:
            self._calibration_source = self.encoder.make_example()
        return self._calibration_source

    @torch.no_grad()
    def forward(self, forward_batch: ForwardBatch, hidden_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Run one forward pass of the decoder; see LM.forward. Sources that are not cached are encoded first.

        Raises:
            ForedraftError: a span has no source, or the decoder has no such boundary.
        """
        for layer in hidden_layers:
            if layer != AFTER_FINAL_NORM and not 0 <= layer <= self.num_layers:
                raise ForedraftError(
                    f"hidden layer {layer} is not a boundary of {self.name}: it has {self.num_layers} layers"
                )
        sources = [span.source for span in forward_batch.spans if span.source is not None]
        if len(sources) < len(forward_batch.spans):
            raise ForedraftError(f"{self.name} is an encoder-decoder model: every request needs a source")
        source_pages = self.cross_kv.get_or_encode(sources)
        stack, dtype, tokens, positions = (
            self.decoder,
            self.model.dtype,
            forward_batch.tokens[0],
            forward_batch.positions[0],
        )
        if self.native is not None:
            inputs = stack.embed(tokens, positions)
            logits, features = self.native.forward(
                forward_batch, inputs, self.pool, self.cross_kv, source_pages, hidden_layers
            )
        else:
            attention = Seq2SeqAttention(
                stack.shape, forward_batch, self.pool, self.cross_kv, source_pages, stack.position_biases, dtype
            )
            logits, features = stack.forward(
                tokens,
                positions,
                attention.attend_self,
                attention.attend_cross,
                hidden_layers,
                forward_batch.logit_rows,
            )
        return logits, None if features is None else features.to(dtype)

    def _encode_cross_kv(self, sources: Sequence[EncoderSource]) -> tuple[list[tuple[Tensor, Tensor]], list[int]]:
        """Compute the cross-attention KV of sources.

        Returns:
            By layer keys and values [T, H, D] of all sources concatenated, and the number of tokens of each source.
        """
        states, lengths = self.encoder.encode_sources(sources)
        if self.native is not None:
            return self.native.project_cross_kv(states), lengths
        sizes = (2, self.decoder.shape.heads, self.decoder.shape.head_dim)
        dtype, layers = self.model.dtype, []
        for block in self.decoder.blocks:
            keys, values = block.cross_kv(states).to(dtype).view(-1, *sizes).unbind(1)
            layers.append((keys, values))
        return layers, lengths


def _compute_logits(decoder: DecoderStack, dtype: torch.dtype, tokens: Tensor, states: Tensor) -> Tensor:
    """Compute the decoder's logits [T, V] for tokens [T] and encoder states [S, H], without KV cache."""
    shape, count = decoder.shape, len(tokens)
    positions = torch.arange(count, device=tokens.device)
    causal_mask = torch.full((count, count), -torch.inf, dtype=dtype, device=tokens.device).triu(1)

    def attend_self(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal_mask
        if decoder.position_biases is not None:
            table = decoder.position_biases[layer if len(decoder.position_biases) > 1 else 0].to(dtype)
            distance = (positions[:, None] - positions[None]).clamp(0, len(table) - 1)
            mask = mask + table[distance].permute(2, 0, 1)
        return _attend(q, k, v, mask, shape.scale)

    def attend_cross(layer: int, q: Tensor) -> Tensor:
        k, v = decoder.blocks[layer].cross_kv(states).view(-1, 2, shape.heads, shape.head_dim).unbind(1)
        return _attend(q, k, v, None, shape.scale)

    return decoder.forward(tokens, positions, attend_self, attend_cross, (), positions)[0]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1).flatten(1)
