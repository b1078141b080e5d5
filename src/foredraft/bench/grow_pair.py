"""Dimensions of a T5 encoder-decoder that is grown."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from foredraft.bench.grow_shape import ModelShape, count_embedding_rows

_FINAL_NORM = "decoder.final_layer_norm.weight"


@dataclass(frozen=True)
class T5Shape(ModelShape):
    """Dimensions of a T5."""

    heads: int
    head_dim: int  # does not grow: T5 does not scale the products of queries and keys
    encoder_layers: int
    decoder_layers: int
    num_up_projections: int  # matrices from the hidden state to the neurons: 2 if gated, else 1
    buckets: int  # distance buckets; each has a bias per head, in the encoder and in the decoder
    embedding_rows: int  # rows of input and output embeddings, see count_embedding_rows

    model_type: ClassVar[str] = "t5"
    title: ClassVar[str] = "T5 models"
    residual_writers: ClassVar[tuple[str, ...]] = (".o.weight", ".wo.weight", "shared.weight")

    @classmethod
    def from_model(cls, model: Any) -> Self:
        config = model.config
        return cls(
            config.d_model, config.d_ff, config.num_heads, config.d_kv, config.num_layers, config.num_decoder_layers,
            2 if config.is_gated_act else 1, config.relative_attention_num_buckets, count_embedding_rows(model),
        )  # fmt: skip

    @classmethod
    def explain_unsupported(cls, config: Any) -> str | None:
        return None if config.is_encoder_decoder else "a T5 without its decoder cannot be grown"

    @staticmethod
    def get_auto_class() -> Any:
        from transformers import AutoModelForSeq2SeqLM

        return AutoModelForSeq2SeqLM

    @property
    def parameters(self) -> int:
        attention = 4 * self.heads * self.head_dim
        feed_forward = (self.num_up_projections + 1) * self.intermediate
        layers = self.encoder_layers * (attention + feed_forward + 2) + self.decoder_layers * (
            2 * attention + feed_forward + 3
        )
        return self.hidden * (layers + self.embedding_rows + 2) + 2 * self.buckets * self.heads

    def widen(self, ratio: int, extra_layers: int) -> Self:
        depth = max(self.encoder_layers, self.decoder_layers)
        layers = (round(n * (depth + extra_layers) / depth) for n in (self.encoder_layers, self.decoder_layers))
        encoder_layers, decoder_layers = layers
        return replace(
            self, hidden=self.hidden * ratio, intermediate=0, heads=self.heads * ratio,
            encoder_layers=encoder_layers, decoder_layers=decoder_layers,
        )  # fmt: skip

    def get_config_changes(self, config: Any) -> dict[str, Any]:
        return {
            "d_model": self.hidden,
            "d_ff": self.intermediate,
            "num_heads": self.heads,
            "num_layers": self.encoder_layers,
            "num_decoder_layers": self.decoder_layers,
            "layer_norm_epsilon": config.layer_norm_epsilon * config.d_model / self.hidden,
        }

    def compute_norm_scale(self, name: str, small: ModelShape, config: Any) -> float:
        if name == _FINAL_NORM and getattr(config, "scale_decoder_outputs", config.tie_word_embeddings):
            return 1.0  # the output is scaled by d_model**-0.5, which shrinks by the same factor
        return super().compute_norm_scale(name, small, config)

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, intermediate {self.intermediate}, {self.heads} heads of {self.head_dim}, "
            f"{self.encoder_layers} encoder layers and {self.decoder_layers} decoder layers"
        )
