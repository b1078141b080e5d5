"""The fixed numbers behind the built-in models: shapes, stages, learning rates."""

from dataclasses import dataclass

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Stage:
    """A stretch of training at one depth and one window length."""

    layers: int
    context: int  # tokens per window
    steps: int  # optimizer steps, of Recipe.batch_tokens tokens each


@dataclass(frozen=True)
class Recipe:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    stages: tuple[Stage, ...]
    batch_tokens: int = 8192
    learning_rate: float = 3e-3
    warmup: int = 40
    decay: float = 0.3  # share of all steps over which the rate falls to zero
    seed: int = 0
    checkpoint_every: int = 100

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)


# Half the depth first, then the layers stacked on themselves: the early steps cost half as much.
TARGET = Recipe(
    hidden=384, intermediate=1024, heads=6, kv_heads=2,
    stages=(Stage(6, 256, 700), Stage(12, 256, 220), Stage(12, 1024, 40)),
)  # fmt: skip
DRAFT = Recipe(
    hidden=256, intermediate=448, heads=4, kv_heads=2,
    stages=(Stage(2, 256, 420), Stage(2, 1024, 40)),
)  # fmt: skip
