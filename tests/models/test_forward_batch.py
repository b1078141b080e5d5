"""Forward batches: the keys that each packed row sees, the slot of its own key, and the effects of padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.kv.allocator import NULL_PAGE
from foredraft.models.forward_batch import MAX_PADDED_ROWS, AttentionGroup, ForwardBatch, Span
from foredraft.tree import TokenTree
from tests.support.random_spans import PAGE_SIZE, spans


def collect_visible_slots(window: ForwardBatch, sliding: int | None) -> dict[int, set[int]]:
    """Collect packed row -> the pool slots it attends to, from the arguments of the attention."""
    result: dict[int, set[int]] = {}
    for group in window.attention_groups:
        slots = _slots(group)
        rows = torch.arange(group.query_positions.shape[1])[None] if group.rows is None else group.rows
        bias = group.get_bias(sliding, torch.float32)
        if bias is None:
            bias = torch.zeros(len(slots), 1, rows.shape[1], slots.shape[1])
        for b in range(len(rows)):
            for i, row in enumerate(rows[b].tolist()):
                seen = set(slots[b][bias[b, 0, i] == 0].tolist())
                assert seen, "a row that sees nothing is NaN"
                assert result.setdefault(row, seen) == seen, "padding repeats a row and must see what that row sees"
    return result


def _slots(group: AttentionGroup) -> torch.Tensor:
    if isinstance(group.slots, slice):
        return torch.arange(group.slots.start, group.slots.stop)[None]
    return group.slots


def compute_visible_slots(spans: list[Span], sliding: int | None) -> dict[int, set[int]]:
    """Compute the same from the definition: committed tokens and ancestors, at most `sliding` positions back."""
    result: dict[int, set[int]] = {}
    for span in spans:
        for i in range(len(span.tokens)):
            node = span.first_node + i
            above = (
                range(node + 1) if span.parents is None else span.build_ancestor_mask()[i].nonzero().flatten().tolist()
            )
            here = span.start + span.depths[node]
            keys = [(at, at) for at in range(span.start)] + [
                (span.start + n, span.start + span.depths[n]) for n in above
            ]
            result[len(result)] = {
                span.pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
                for at, position in keys
                if sliding is None or here - position < sliding
            }
    return result


@given(spans(), st.sampled_from([None, 1, 2, 5, 100]))
def test_every_row_sees_its_own_past_and_nothing_else(spans: list[Span], sliding: int | None) -> None:
    window = ForwardBatch.build(spans, [0], PAGE_SIZE, "cpu")
    assert collect_visible_slots(window, sliding) == compute_visible_slots(spans, sliding)


@given(spans())
def test_keys_go_to_slots_of_their_own_and_never_to_the_null_page(spans: list[Span]) -> None:
    window = ForwardBatch.build(spans, [0], PAGE_SIZE, "cpu")
    write = window.write_slots.tolist()
    assert len(set(write)) == len(write) == window.num_rows
    assert min(write) >= (NULL_PAGE + 1) * PAGE_SIZE
    assert max(write) < window.num_slots
    own = compute_visible_slots(spans, 1)  # a row always sees its own key
    assert all(write[row] in seen for row, seen in own.items())


@given(spans())
def test_positions_are_what_depth_says(spans: list[Span]) -> None:
    window = ForwardBatch.build(spans, [0], PAGE_SIZE, "cpu")
    expected = [span.start + depth for span in spans for depth in span.depths[span.first_node :]]
    assert window.positions.tolist() == [expected]


def test_a_lone_request_on_contiguous_pages_is_a_slice() -> None:
    (group,) = ForwardBatch.build([Span([3, 4, 5], 6, [1, 2], [0, 1])], [1], PAGE_SIZE, "cpu").attention_groups
    assert group.slots == slice(12, 20)
    assert group.rows is None


def test_a_lone_token_needs_no_mask() -> None:
    (group,) = ForwardBatch.build([Span([3, 9], 6, [1], [0])], [0], PAGE_SIZE, "cpu").attention_groups
    assert isinstance(group.slots, torch.Tensor)
    assert group.get_bias(None, torch.float32) is None
    assert group.get_bias(7, torch.float32) is None
    assert group.get_bias(6, torch.float32) is not None


def test_a_bias_is_made_once_per_step_and_window_width() -> None:
    (group,) = ForwardBatch.build([Span([3, 9], 3, [1, 2, 3], [0, 1, 2])], [0], PAGE_SIZE, "cpu").attention_groups
    assert group.get_bias(2, torch.float32) is group.get_bias(2, torch.float32)
    assert group.get_bias(2, torch.float32) is not group.get_bias(3, torch.float32)


def test_long_requests_are_not_padded_with_short_ones() -> None:
    lengths = [2, MAX_PADDED_ROWS + 1, 5]
    pages = iter(range(1, 99))
    requests = [Span([next(pages) for _ in range(-(-n // PAGE_SIZE))], 0, [7] * n, range(n)) for n in lengths]
    groups = ForwardBatch.build(requests, [0], PAGE_SIZE, "cpu").attention_groups
    assert sorted(tuple(group.query_positions.shape) for group in groups) == [(1, MAX_PADDED_ROWS + 1), (2, 5)]


@pytest.mark.parametrize("every_row", [(), (0,), (1,), (0, 1)])
def test_logits_of_scored_nodes_and_of_whole_prompts_where_asked(every_row: tuple[int, ...]) -> None:
    drafts = TokenTree.from_lists([[5, 6, 7], [8]], [[-1, 0, 0], [-1]])
    tree = drafts.prepend_committed([[1, 2], []], [[2, 5], []])
    window = ForwardBatch.from_token_tree(tree, [0, 4], [[1, 2], [3, 4]], PAGE_SIZE, "cpu", every_row)
    assert window.logit_rows.tolist() == [*(range(5) if 0 in every_row else (2, 3, 4)), 5]
    assert window.tokens.tolist() == [[1, 2, 5, 6, 7, 8]]
    assert window.positions.tolist() == [[0, 1, 2, 3, 3, 4]]
