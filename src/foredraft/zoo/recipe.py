"""The fixed numbers behind the built-in models: shapes, stages, learning rates."""

from dataclasses import dataclass, replace

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class TrainStage:
    """A stretch of training at one depth and one window length."""

    layers: int
    context: int  # tokens per window
    steps: int  # optimizer steps, of Recipe.batch_tokens tokens each


@dataclass(frozen=True)
class LlamaRecipe:
    """Warm-up, a constant rate, then a decay to zero that may begin at any step: an early end still gives a good model.

    `stages` are the steps at the constant rate; the decay comes on top of them.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    stages: tuple[TrainStage, ...]
    batch_tokens: int = 8192
    micro_tokens: int = 2048  # tokens whose gradients are computed at once: what a core's cache holds
    learning_rate: float = 2e-3
    warmup: int = 40  # steps, again after every change of depth
    decay: float = 0.25  # steps of the decay, as a share of the steps before it
    long_share: float = 0.2  # of the decay's steps, the last ones, with long windows
    long_context: int = 1024  # tokens
    seed: int = 0
    checkpoint_seconds: float = 600.0

    @property
    def steps(self) -> int:
        """Steps at the constant rate."""
        return sum(stage.steps for stage in self.stages)

    @property
    def total_tokens(self) -> int:
        """Tokens read in all, the decay included."""
        return self.batch_tokens * (self.steps + sum(stage.steps for stage in self.make_decay_stages(self.steps)))

    def make_decay_stages(self, num_steps: int) -> tuple[TrainStage, TrainStage]:
        """The stages of a decay that begins after `done` steps."""
        steps = max(2, round(self.decay * num_steps))
        long = max(1, round(self.long_share * steps))
        last = self.stages[-1]
        return TrainStage(last.layers, last.context, steps - long), TrainStage(last.layers, self.long_context, long)

    def scale(self, tokens: int | None, batch_tokens: int | None, device: str) -> "LlamaRecipe":
        """The same stages in proportion for another number of tokens in all, or for other batches. On CUDA a batch is
        one computation."""
        batch = batch_tokens or (CUDA_BATCH_TOKENS if device.startswith("cuda") else self.batch_tokens)
        factor = (tokens or self.total_tokens) / self.total_tokens * self.batch_tokens / batch
        stages = tuple(replace(stage, steps=max(1, round(factor * stage.steps))) for stage in self.stages)
        micro = batch if device.startswith("cuda") else min(self.micro_tokens, batch)
        return replace(self, stages=stages, batch_tokens=batch, micro_tokens=micro)


CUDA_BATCH_TOKENS = 65536

# Half the depth first, then the layers stacked on themselves: the early steps cost half as much. 61 M tokens.
TARGET_RECIPE = LlamaRecipe(
    hidden=384, intermediate=1024, heads=6, kv_heads=2,
    stages=(TrainStage(6, 256, 4600), TrainStage(12, 256, 1400)),
)  # fmt: skip
# 100 M tokens
DRAFT_RECIPE = LlamaRecipe(
    hidden=256, intermediate=448, heads=4, kv_heads=2, learning_rate=3e-3,
    stages=(TrainStage(2, 256, 9800),),
)  # fmt: skip
