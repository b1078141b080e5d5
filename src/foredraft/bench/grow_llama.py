"""Dimensions of a Llama that is grown."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from foredraft.bench.grow_shape import ModelShape, count_embedding_rows


@dataclass(frozen=True)
class LlamaShape(ModelShape):
    """Dimensions of a Llama."""

    heads: int
    kv_heads: int
    layers: int
    head_dim: int
    embedding_rows: int  # rows of input and output embeddings, see count_embedding_rows

    model_type: ClassVar[str] = "llama"
    title: ClassVar[str] = "Llama models without biases"
    residual_writers: ClassVar[tuple[str, ...]] = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight")

    @classmethod
    def from_model(cls, model: Any) -> Self:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads,
            config.num_hidden_layers, head_dim, count_embedding_rows(model),
        )  # fmt: skip

    @classmethod
    def explain_unsupported(cls, config: Any) -> str | None:
        if config.attention_bias or config.mlp_bias:
            return "a Llama model with biases cannot be grown"
        return None if config.pretraining_tp == 1 else "a model with pretraining_tp other than 1 cannot be grown"

    @staticmethod
    def get_auto_class() -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    @property
    def parameters(self) -> int:
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        layer = self.hidden * (heads + 3 * self.intermediate + 2)
        return self.layers * layer + self.hidden * (self.embedding_rows + 1)

    def widen(self, ratio: int, extra_layers: int) -> Self:
        # Heads grow with the hidden state. The number of query heads per key head stays, and so does the grouping.
        return replace(
            self, hidden=self.hidden * ratio, intermediate=0, heads=self.heads * ratio,
            kv_heads=self.kv_heads * ratio, layers=self.layers + extra_layers,
        )  # fmt: skip

    def get_config_changes(self, config: Any) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_hidden_layers": self.layers,
            "head_dim": self.head_dim,
            "rms_norm_eps": config.rms_norm_eps * config.hidden_size / self.hidden,
        }

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, intermediate {self.intermediate}, {self.heads} heads, {self.kv_heads} key heads of "
            f"{self.head_dim}, {self.layers} layers"
        )
