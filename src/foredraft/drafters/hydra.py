"""Hydra (2402.05109): Medusa's heads made aware of each other. Head i reads the target's state h_{n-2} and the
embeddings of all tokens since, x_{n-1} and those drafted before its own, and guesses the next.

Heads are asked one after another, but none has memory: what a node's head reads is its own path, so a tree costs one
row for every node looked at. The authors' "prefix-mlp", Hydra++, puts a layer with memory between the target and the
heads: see `hydra_prefix`.
"""

from dataclasses import dataclass

from foredraft.checkpoints.base import Checkpoint, HydraShape
from foredraft.drafters.base import Context
from foredraft.drafters.borrowed import lender, loaded
from foredraft.drafters.growth import Plan
from foredraft.drafters.hydra_network import HydraSteps, prefix_of, tap
from foredraft.drafters.hydra_prefix import PrefixDrafter
from foredraft.drafters.hydra_training import TrainConfig, trainee
from foredraft.drafters.newest import Products
from foredraft.drafters.rank_tree import RankTree, usual
from foredraft.drafters.recurrent import feature_lm
from foredraft.drafters.stepped import SteppedDrafter
from foredraft.errors import ForedraftError

__all__ = ["METHOD", "Config", "TrainConfig", "create", "trainee"]

METHOD = "hydra"
RANKS = 10  # guesses of a head that a published tree uses


@dataclass(frozen=True)
class Config:
    """`tree_nodes` and `top_k`: a tree of the likeliest paths, every level looking at `top_k` nodes. `branching`: a
    tree of that shape. `tree`: one of these paths of ranks, as the authors publish them. None of them: a chain.
    `min_confidence`: a draft ends where no path of it is likelier than this."""

    tree_nodes: int | None = None
    top_k: int | None = None
    branching: tuple[int, ...] | None = None
    tree: tuple[tuple[int, ...], ...] | None = None
    min_confidence: float = 0.0
    quantization: str | None = None

    def plan(self, num_tokens: int, shape: HydraShape) -> Plan:
        """What to draft, no deeper than there are heads. Raises ForedraftError where that is nothing."""
        if self.branching is not None and len(self.branching) > shape.num_heads:
            raise ForedraftError(f"branching is {len(self.branching)} deep, and there are {shape.num_heads} heads")
        depth = min(num_tokens, shape.num_heads)
        plan = Plan.of(depth, self.tree_nodes, self.top_k, self.branching, self.min_confidence)
        if self.tree is None:
            return plan
        if (self.tree_nodes, self.top_k, self.branching) != (None, None, None):
            raise ForedraftError("tree fixes every node; give it without tree_nodes, top_k and branching")
        return Plan.shaped(RankTree.of(self.tree, usual(shape.num_heads, RANKS)), self.min_confidence)


def create(config: Config, context: Context) -> SteppedDrafter | PrefixDrafter:
    """Load the heads. Raises ForedraftError if they are not the target's, or of an architecture that is not read."""
    return from_checkpoint(config, loaded(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: Context) -> SteppedDrafter | PrefixDrafter:
    """From heads that are loaded, beside context.target."""
    shape = checkpoint.shape
    if not isinstance(shape, HydraShape):
        raise ForedraftError(f"{checkpoint.folder} holds no Hydra heads but {checkpoint.format}")
    plan, target = config.plan(context.num_tokens, shape), lender(context)
    products = Products(context, config.quantization)
    steps = HydraSteps(shape, checkpoint.tensors, plan.depth, products, target, context.vocab_size)
    if shape.prefix is None:
        return SteppedDrafter(steps, plan, context, tap(shape, target))
    network = prefix_of(checkpoint, target).to(context.device, context.dtype).eval()
    return PrefixDrafter(feature_lm(network, lambda network: None, context), tap(shape, target), steps, plan, context)
