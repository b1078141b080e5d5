"""Random requests of a forward batch, for property tests."""

from random import Random

from hypothesis import strategies as st

from foredraft.models.forward_batch import MAX_PADDED_ROWS, Span
from foredraft.tree import TokenTree

PAGE_SIZE = 4


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    """Requests with chunks, chains, trees and frontiers of a growing tree, on pages that are contiguous or not."""
    result, free = [], list(range(1, 200))
    if draw(st.booleans()):
        Random(draw(st.integers(0, 99))).shuffle(free)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, 11))
        count = draw(st.integers(1, 9)) + draw(st.sampled_from([0, 0, MAX_PADDED_ROWS]))
        parents = [-1, *[draw(st.integers(max(0, node - 3), node - 1)) for node in range(1, count)]]
        is_tree = draw(st.booleans())
        tree = TokenTree.from_lists([[7] * count], [parents if is_tree else range(-1, count - 1)])
        first = draw(st.integers(0, count - 1)) if is_tree else 0
        pages = [free.pop(0) for _ in range(-(-(start + count) // PAGE_SIZE))]
        known = parents if is_tree else None
        result.append(Span(pages, start, [7] * (count - first), tree.depths[0], known, first))
    return result
