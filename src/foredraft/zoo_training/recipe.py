"""Recipes of the built-in target and draft model: shapes, training stages, learning rates."""

from dataclasses import dataclass, replace

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class TrainStage:
    """Stage of training with a fixed depth and window length."""

    layers: int
    context: int  # tokens per window
    steps: int  # optimizer steps, of `LlamaRecipe.batch_tokens` tokens each


@dataclass(frozen=True)
class LlamaRecipe:
    """Shape and training schedule of a Llama model.

    The learning rate warms up, stays constant during `stages`, and then decays to zero in further steps. The decay may
    begin at any step, so that a run that is ended early still gives a good model. In every further cycle, the rate
    warms up again and decays to zero over the stages of the cycle.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    stages: tuple[TrainStage, ...]
    batch_tokens: int = 8192
    micro_tokens: int = 2048  # tokens per forward and backward pass, chosen to fit the cache of a CPU core
    learning_rate: float = 2e-3
    warmup: int = 40  # steps of warm-up, at the start and after every change of depth
    decay: float = 0.25  # steps of the decay over the steps before it
    long_share: float = 0.2  # share of the decay's steps, the last ones, that have long windows
    long_context: int = 1024  # tokens per long window
    cycles: tuple[tuple[TrainStage, ...], ...] = ()  # further cycles, which start from the weights of the last decay
    seed: int = 0
    checkpoint_seconds: float = 600.0  # time between checkpoints

    @property
    def steps(self) -> int:
        """Steps at the constant learning rate, warm-up included."""
        return sum(stage.steps for stage in self.stages)

    @property
    def total_tokens(self) -> int:
        """Training tokens, the decay and the further cycles included."""
        return self.batch_tokens * (
            self.steps + self.count_decay_steps(0, self.steps) + sum(stage.steps for stage in sum(self.cycles, ()))
        )

    def find_decay_stages(self, cycle: int, start: int) -> tuple[TrainStage, ...]:
        """Return the stages of the decay of a cycle that begins at step `start`; cycle 0 follows the constant rate."""
        return self.cycles[cycle - 1] if cycle else self.make_decay_stages(start)

    def count_decay_steps(self, cycle: int, start: int) -> int:
        """Return the steps of the decay of a cycle that begins at step `start`."""
        return sum(stage.steps for stage in self.find_decay_stages(cycle, start))

    def make_decay_stages(self, num_steps: int) -> tuple[TrainStage, TrainStage]:
        """Return the two stages of a decay that begins after `num_steps` steps: short windows, then long ones."""
        steps = max(2, round(self.decay * num_steps))
        long = max(1, round(self.long_share * steps))
        last = self.stages[-1]
        return TrainStage(last.layers, last.context, steps - long), TrainStage(last.layers, self.long_context, long)

    def scale(self, tokens: int | None, batch_tokens: int | None, device: str) -> "LlamaRecipe":
        """Return the recipe with its stages scaled to another number of tokens or another batch size.

        Args:
            tokens: training tokens, the decay included. None = those of the recipe.
            batch_tokens: tokens per step. None = those of the recipe, or 65,536 on CUDA.
            device: device of training. On CUDA a batch is one forward and backward pass.
        """
        batch = batch_tokens or (CUDA_BATCH_TOKENS if device.startswith("cuda") else self.batch_tokens)
        factor = (tokens or self.total_tokens) / self.total_tokens * self.batch_tokens / batch
        stages, *cycles = (
            tuple(replace(stage, steps=max(1, round(factor * stage.steps))) for stage in part)
            for part in (self.stages, *self.cycles)
        )
        micro = batch if device.startswith("cuda") else min(self.micro_tokens, batch)
        return replace(self, stages=stages, cycles=tuple(cycles), batch_tokens=batch, micro_tokens=micro)


CUDA_BATCH_TOKENS = 65536  # default tokens per step on CUDA

# 73 M tokens. Training starts with half of the layers, which halves the cost of a step; then they are repeated once.
TARGET_RECIPE = LlamaRecipe(
    hidden=384, intermediate=1024, heads=6, kv_heads=2,
    stages=(TrainStage(6, 256, 4600), TrainStage(12, 256, 1400)),
    cycles=((TrainStage(12, 512, 1050), TrainStage(12, 1024, 350)),),
)  # fmt: skip
# 113 M tokens
DRAFT_RECIPE = LlamaRecipe(
    hidden=256, intermediate=448, heads=4, kv_heads=2, learning_rate=3e-3,
    stages=(TrainStage(2, 256, 9800),),
    cycles=((TrainStage(2, 256, 1150), TrainStage(2, 1024, 350)),),
)  # fmt: skip
