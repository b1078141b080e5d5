"""Draft nodes of a step: what the draft-length policy grants, within the token budget and the free pages."""

from collections.abc import Sequence

from foredraft.draft_length.length_table import LengthBounds
from foredraft.draft_length.policy import DraftCandidate, DraftLengthPolicy
from foredraft.engine.step_chunks import Chunk
from foredraft.kv.allocator import OutOfPagesError, PageAllocator
from foredraft.request import Request


def grant_draft_nodes(
    scheduled: Sequence[Chunk],
    bounds: LengthBounds,
    length_policy: DraftLengthPolicy,
    allocator: PageAllocator,
    tokens_left: int,
) -> tuple[int, ...]:
    """Return the draft nodes of each scheduled request, and reserve their pages.

    Only requests whose chunk ends with their last committed token can draft. A draft whose pages are not free is left
    out: drafts preempt no request.

    Args:
        scheduled: chunks of the step.
        bounds: least and most draft nodes of a request, by drafter and operator. A request may narrow them.
        length_policy: grants draft nodes to each request.
        allocator: pages of the KV pools.
        tokens_left: tokens of the step's budget that the chunks leave.
    """
    if not bounds.most:
        return (0,) * len(scheduled)
    kinds = _find_kinds(scheduled)
    if not bounds.least and kinds is not None and length_policy.repeat_none(len(scheduled), kinds):
        return (0,) * len(scheduled)
    candidates: list[DraftCandidate] = []
    indices: list[int] = []  # of the candidates in `scheduled`
    for i, (request, chunk) in enumerate(scheduled):
        own = request.spec.options.draft_lengths  # those that the request set; None = none
        least, most = bounds if own is None else bounds.narrow(own.find(len(scheduled)))
        if most > 0 and request.num_computed + chunk == request.num_tokens and request.max_draft_depth > 0:
            candidates.append(DraftCandidate(request.slot, most, least, _find_kind(request), not request.lacks_states))
            indices.append(i)
    result = [0] * len(scheduled)
    if candidates:
        num_pass_tokens = sum(chunk for _, chunk in scheduled)  # tokens of the forward pass without draft nodes
        # Each of them counts as attending to all earlier tokens and to its whole chunk.
        attended_tokens = sum(chunk * (request.num_computed + chunk) for request, chunk in scheduled)
        granted = length_policy.allocate(candidates, num_pass_tokens, attended_tokens)
        for i, num_nodes in zip(indices, granted, strict=True):
            request, chunk = scheduled[i]
            result[i] = _reserve(allocator, request, request.num_computed + chunk, min(num_nodes, tokens_left))
            tokens_left -= result[i]
    return tuple(result)


def _find_kind(request: Request) -> int:
    """Return 0 for a greedy request and 1 for a sampled one: the policy has separate estimates."""
    return int(not request.spec.sampling.is_greedy)


def _find_kinds(scheduled: Sequence[Chunk]) -> set[int] | None:
    """Return the kinds of the requests; None if one of them set draft lengths of its own."""
    # One pass over the requests, because this is done in every step.
    found = {(r.spec.options.draft_lengths is None, r.spec.sampling.is_greedy) for r, _ in scheduled}
    return {int(not is_greedy) for _, is_greedy in found} if all(has_none for has_none, _ in found) else None


def _reserve(allocator: PageAllocator, request: Request, length: int, num_nodes: int) -> int:
    """Reserve pages for draft nodes after `length` tokens. Returns their number, or 0 if too few pages are free."""
    if num_nodes <= 0:
        return 0
    try:
        allocator.grow(request.pages, length + num_nodes)
    except OutOfPagesError:
        return 0
    return num_nodes
