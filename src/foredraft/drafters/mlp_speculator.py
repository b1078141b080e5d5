"""MLP speculator (2404.19124): a state vector goes from token to token through one small layer per step.

It begins as h_{n-2}, the target's state below the last committed token x_{n-1}; step i adds the embedding of the token
before it and guesses the next. States are a node's own, so a tree costs one row for every node looked at.
"""

from dataclasses import dataclass

from foredraft.checkpoints.base import Checkpoint, SpeculatorShape
from foredraft.drafters.base import Context
from foredraft.drafters.borrowed import loaded
from foredraft.drafters.growth import Plan
from foredraft.drafters.mlp_network import Steps
from foredraft.drafters.mlp_training import TrainConfig, trainee
from foredraft.drafters.newest import Products
from foredraft.drafters.stepped import SteppedDrafter
from foredraft.errors import ForedraftError

__all__ = ["METHOD", "Config", "TrainConfig", "create", "trainee"]

METHOD = "mlp_speculator"


@dataclass(frozen=True)
class Config:
    """`tree_nodes` and `top_k`: a tree of the likeliest paths, every level looking at `top_k` nodes. `branching`: a
    tree of that shape, or "published" for the one in the checkpoint's config, of which the `n_candidates` likeliest
    whole paths are verified as its authors do (under `reject` as many nodes, drawn). Neither: a chain.
    `min_confidence`: a draft ends where no path of it is likelier than this."""

    tree_nodes: int | None = None
    top_k: int | None = None
    branching: tuple[int, ...] | str | None = None
    min_confidence: float = 0.0
    quantization: str | None = None

    def plan(self, num_tokens: int, shape: SpeculatorShape) -> Plan:
        """What to draft, no deeper than the speculator was trained for. Raises ForedraftError where that is nothing."""
        branching, candidates = self.branching, None
        if isinstance(branching, str):
            if branching != "published":
                raise ForedraftError(f'branching takes numbers of children by depth, or "published", got {branching!r}')
            if shape.branching is None:
                raise ForedraftError("the checkpoint says no top_k_tokens_per_head; give branching as numbers")
            branching, candidates = shape.branching, shape.candidates
        if branching is not None and len(branching) > shape.n_predict:
            raise ForedraftError(
                f"branching is {len(branching)} deep, and the speculator was trained for {shape.n_predict} steps"
            )
        depth = min(num_tokens, shape.n_predict)
        plan = Plan.of(depth, self.tree_nodes, self.top_k, branching, self.min_confidence)
        return plan if candidates is None else plan.whole_paths(candidates)


def create(config: Config, context: Context) -> SteppedDrafter:
    """Load the speculator. Raises ForedraftError if it is not the target's."""
    return from_checkpoint(config, loaded(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: Context) -> SteppedDrafter:
    """From one that is loaded."""
    shape = checkpoint.shape
    if not isinstance(shape, SpeculatorShape):
        raise ForedraftError(f"{checkpoint.folder} holds no MLP speculator but {checkpoint.format}")
    plan = config.plan(context.num_tokens, shape)
    products = Products(context, config.quantization)
    steps = Steps(shape, checkpoint.tensors, plan.depth, products, context.vocab_size)
    return SteppedDrafter(steps, plan, context)
