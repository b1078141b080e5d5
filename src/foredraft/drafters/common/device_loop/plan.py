"""Plan of a recorded draft loop: its fixed sizes, and the decision which drafts it takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from foredraft.drafters.common.device_loop.shape import DynamicShape, FixedShape
from foredraft.drafters.common.tree_builder import TreeBuilder, TreeSpec
from foredraft.sampling.row_settings import FilterSizes

BYTES_PER_PROB, BYTES_PER_SCORE = 4, 24  # float32; noise, its logarithm and the score in float64
MAX_REQUESTS = 64  # drafts of one recording; more are drafted level by level
MAX_PROB_BYTES = 1 << 30  # of the probabilities and scores of a recording
MIN_CONTEXT = 512  # tokens: the smallest context of a recording


class ChildChoice(Enum):
    """How children are chosen."""

    ARGMAX = auto()  # the likeliest token, without its probability: greedy chains
    LIKELIEST = auto()  # the likeliest tokens, in greedy drafts
    SAMPLED = auto()  # from the distribution under each request's settings


@dataclass(frozen=True)
class LoopPlan:
    """Sizes of a recorded loop. Drafts with equal plans share a recording."""

    num_requests: int  # rounded up; the last ones are padding
    shape: FixedShape | DynamicShape
    choice: ChildChoice
    filters: FilterSizes
    is_raced: bool  # whether a request samples
    uses_q: bool  # whether a rule reads q
    has_stream: bool  # whether the noise has the number of a stream
    num_end_ids: int  # of a request, rounded up
    context: int  # keys that a row sees at most, rounded up; 0 = the network has no KV cache

    @property
    def num_slots(self) -> int:
        """KV positions of a draft, that of its root included."""
        if isinstance(self.shape, FixedShape):
            return self.shape.num_nodes
        return 1 + max(self.shape.max_nodes, self.shape.width)

    def list_level_shapes(self) -> list[tuple[int, int]]:
        """List the places of every level, and the children of a place."""
        if isinstance(self.shape, FixedShape):
            return [(len(level.paths), level.width) for level in self.shape.levels]
        width = self.shape.width
        return [(width if level else 1, width) for level in range(self.shape.depth)]

    def count_prob_bytes(self, vocab_size: int) -> int:
        """Count the bytes of probabilities and scores over a vocabulary: in use by a level, and kept for the end."""
        if self.choice is not ChildChoice.SAMPLED:
            return 0
        places = [places for places, _ in self.list_level_shapes()]
        kept = sum(places) if self.uses_q else 0
        return self.num_requests * vocab_size * (BYTES_PER_SCORE * max(places) + BYTES_PER_PROB * kept)


def round_up(count: int) -> int:
    """Round up to a power of two; 0 stays."""
    return 1 << (count - 1).bit_length() if count else 0


def plan_loop(
    builders: Sequence[TreeBuilder], tree_spec: TreeSpec, ends: Sequence[int] | None, vocab_size: int
) -> "LoopPlan | str":
    """Plan the recorded loop of some drafts.

    Args:
        builders: drafts with their roots only.
        tree_spec: shape of the drafter's trees, of which every draft is a part.
        ends: number of KV entries of every request, the root's included; None = the network has no KV cache.
        vocab_size: number of tokens that q covers.

    Returns:
        The plan; or the reason why these drafts grow level by level.
    """
    reason = _explain_refusal(builders)
    if reason is not None:
        return reason
    shape = _choose_shape(builders, tree_spec)
    if isinstance(shape, str):
        return shape
    is_greedy = all(g.is_greedy for g in builders)
    is_chain = all(g.tree_spec.width == 1 for g in builders)
    plan = LoopPlan(
        round_up(len(builders)),
        shape,
        (ChildChoice.ARGMAX if is_chain else ChildChoice.LIKELIEST) if is_greedy else ChildChoice.SAMPLED,
        FilterSizes.measure([g.request.spec.sampling for g in builders if not g.is_greedy]),
        any(g.uses_q or g.shares_noise for g in builders),
        any(g.uses_q for g in builders),
        any(g.draft_stream for g in builders),
        round_up(max(len(g.request.spec.end_ids) for g in builders)),
        0 if ends is None else max(MIN_CONTEXT, round_up(max(ends) + shape.depth)),
    )
    is_too_large = plan.count_prob_bytes(vocab_size) > MAX_PROB_BYTES
    return "probabilities of too many nodes at once" if is_too_large else plan


def _explain_refusal(builders: Sequence[TreeBuilder]) -> str | None:
    if len(builders) > MAX_REQUESTS:
        return f"more than {MAX_REQUESTS} drafts at once"
    for g in builders:
        spec = g.request.spec
        if spec.sampling.shapes_logits:
            return "logits that depend on the tokens before them (grammar, penalties, bias, bad words)"
        if spec.sampling.typical_p < 1 and not g.is_greedy:
            return "typical_p"
        if g.tree_spec.min_confidence > 0:
            return "min_confidence"
        if g.samples_independently:
            return "a rule for children that are sampled independently"
        if spec.source is not None:
            return "an encoder"
    return None


def _choose_shape(builders: Sequence[TreeBuilder], tree_spec: TreeSpec) -> FixedShape | DynamicShape | str:
    specs = [g.tree_spec for g in builders]
    depth = max(spec.max_depth for spec in specs)
    if all(spec.is_chain for spec in specs):
        return FixedShape.from_chain(depth)
    if all(not spec.is_static for spec in specs):
        width = max(spec.width for spec in specs)
        if any(spec.width != width for spec in specs):
            return "trees of different widths"
        return DynamicShape(width, depth, tree_spec.max_nodes)
    if tree_spec.static_tree is not None and all(spec.is_static for spec in specs):
        shape = FixedShape.from_tree(tree_spec.static_tree, min(depth, tree_spec.static_tree.depth))
        if all(shape.count_children(spec) is not None for spec in specs):
            return shape
    return "drafts of different kinds at once"
