"""The sizes of a T5: an encoder, and a decoder that reads what it says."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from foredraft.bench.grow_shape import Shape, table_rows

_LAST_NORM = "decoder.final_layer_norm.weight"


@dataclass(frozen=True)
class Pair(Shape):
    """What decides the size of a T5."""

    heads: int
    head_dim: int  # of its own: T5 multiplies no product of query and key by anything, so it stays
    encoder_layers: int
    decoder_layers: int
    wide: int  # matrices from the hidden state to the neurons: 2 where one gates the other
    buckets: int  # of distances, each with a bias for every head, once in the encoder and once in the decoder
    embeddings: int  # rows, as table_rows counts them

    model_type: ClassVar[str] = "t5"
    title: ClassVar[str] = "T5 models"
    writers: ClassVar[tuple[str, ...]] = (".o.weight", ".wo.weight", "shared.weight")

    @classmethod
    def of(cls, model: Any) -> Self:
        config = model.config
        return cls(
            config.d_model, config.d_ff, config.num_heads, config.d_kv, config.num_layers, config.num_decoder_layers,
            2 if config.is_gated_act else 1, config.relative_attention_num_buckets, table_rows(model),
        )  # fmt: skip

    @classmethod
    def refusal(cls, config: Any) -> str | None:
        return None if config.is_encoder_decoder else "a T5 without its decoder cannot be grown"

    @staticmethod
    def maker() -> Any:
        from transformers import AutoModelForSeq2SeqLM

        return AutoModelForSeq2SeqLM

    @property
    def parameters(self) -> int:
        attention = 4 * self.heads * self.head_dim
        feed = (self.wide + 1) * self.intermediate
        layers = self.encoder_layers * (attention + feed + 2) + self.decoder_layers * (2 * attention + feed + 3)
        return self.hidden * (layers + self.embeddings + 2) + 2 * self.buckets * self.heads

    def wider(self, ratio: int, further: int) -> Self:
        depth = max(self.encoder_layers, self.decoder_layers)
        layers = (round(n * (depth + further) / depth) for n in (self.encoder_layers, self.decoder_layers))
        encoder_layers, decoder_layers = layers
        return replace(
            self, hidden=self.hidden * ratio, intermediate=0, heads=self.heads * ratio,
            encoder_layers=encoder_layers, decoder_layers=decoder_layers,
        )  # fmt: skip

    def changes(self, config: Any) -> dict[str, Any]:
        return {
            "d_model": self.hidden,
            "d_ff": self.intermediate,
            "num_heads": self.heads,
            "num_layers": self.encoder_layers,
            "num_decoder_layers": self.decoder_layers,
            "layer_norm_epsilon": config.layer_norm_epsilon * config.d_model / self.hidden,
        }

    def norm_scale(self, name: str, small: Shape, config: Any) -> float:
        if name == _LAST_NORM and getattr(config, "scale_decoder_outputs", config.tie_word_embeddings):
            return 1.0  # what comes out is multiplied by d_model**-0.5, which has become smaller by just that
        return super().norm_scale(name, small, config)

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, intermediate {self.intermediate}, {self.heads} heads of {self.head_dim}, "
            f"{self.encoder_layers} layers of encoder and {self.decoder_layers} of decoder"
        )
