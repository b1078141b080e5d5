"""The prefix cache by itself: hits, their owners, misses that must stay misses, and the order of eviction."""

import pytest

from foredraft.kv.allocator import OutOfPagesError, PageAllocator
from foredraft.kv.draft_kv import DraftKV
from foredraft.kv.pool import KVPool
from foredraft.kv.prefix_cache import PrefixCache, PrefixHit
from foredraft.request import Request
from foredraft.sampling.params import Sampling
from tests.support.requests import make_request

PAGE = 4
TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


class Owner:
    """A drafter whose memory is valid to the given degree."""

    def __init__(self, lookahead: int = 0) -> None:
        self.draft_kv: DraftKV | None = DraftKV(
            KVPool(), token_lookahead=lookahead, is_rebuildable_from_tokens=not lookahead
        )


def request(tokens: list[int], slot: int = 0, page_salt: bytes = b"") -> Request:
    return make_request(slot, tokens, Sampling(), page_salt=page_salt)


def fill(cache: PrefixCache, r: Request, computed: int) -> Request:
    """Grow the pages of a request to `computed` tokens and insert them into the cache."""
    cache.allocator.grow(r.pages, computed)
    r.num_computed = computed
    cache.insert(r)
    return r


def start(cache: PrefixCache, r: Request) -> Request:
    """Give a request the pages of its hit, as the scheduler does."""
    hit = cache.match(r)
    cache.acquire(r, hit)
    r.pages += hit.pages
    r.num_computed = len(hit.pages) * PAGE
    return r


def cache_of(num_pages: int = 20, owner: Owner | None = None, **options: bool) -> PrefixCache:
    return PrefixCache(PageAllocator(num_pages, PAGE), owner, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "num_pages"),
    [
        (TEXT, 2),  # the last token is computed again, for its logits
        ([*TEXT, 1], 3),
        ([*TEXT[:8], 1], 2),
        (TEXT[:8], 1),
        ([*TEXT[:7], 99, *TEXT[8:]], 1),
        ([99, *TEXT[1:]], 0),
        (TEXT[4:], 0),  # equal tokens after other ones are another page
        (TEXT[:3], 0),
    ],
)
def test_a_hit_is_the_longest_run_of_equal_pages(tokens: list[int], num_pages: int) -> None:
    cache = cache_of()
    first = fill(cache, request(TEXT), 12)
    assert cache.match(request(tokens)).pages == tuple(first.pages[:num_pages])


def test_only_full_pages_of_what_is_computed_are_found() -> None:
    """Slots beyond what was committed hold rejected drafts."""
    cache = cache_of()
    cache.allocator.grow(pages := [], 12)
    r = request(TEXT)
    r.pages = pages
    r.num_computed = 7
    cache.insert(r)
    assert cache.match(request([*TEXT, 1])).pages == (pages[0],)


def test_what_is_found_is_held_by_both_and_stays_when_one_ends() -> None:
    cache = cache_of()
    first, second = fill(cache, request(TEXT), 12), request([*TEXT, 1], slot=1)
    start(cache, second)
    assert second.pages == [1, 2, 3]
    assert (second.num_computed, cache.allocator.num_holders(1)) == (12, 2)
    cache.release(first, is_finished=True)
    assert (cache.allocator.num_used, cache.allocator.num_cached) == (3, 0)
    cache.release(second, is_finished=True)
    assert (cache.allocator.num_used, cache.allocator.num_cached) == (0, 3)
    cache.check_integrity()


def test_of_equal_pages_the_first_stays() -> None:
    cache = cache_of()
    fill(cache, request(TEXT), 12)
    second = fill(cache, request(TEXT, slot=1), 12)
    assert cache.match(request(TEXT)).pages == (1, 2)
    cache.release(second, is_finished=True)
    assert cache.allocator.num_cached == 0, "the second's pages are free, not kept"


def test_salts_are_apart() -> None:
    cache = cache_of()
    fill(cache, request(TEXT, page_salt=b"a"), 12)
    assert not cache.match(request(TEXT)).pages
    assert not cache.match(request(TEXT, page_salt=b"b")).pages
    assert cache.match(request(TEXT, page_salt=b"a")).pages


def test_hashes_are_keyed_and_made_once() -> None:
    """The same text has other hashes in another cache; a request reuses its hashes."""
    one, other = request(TEXT), request(TEXT)
    hashes = []
    for r in (one, other):
        cache = cache_of()
        fill(cache, r, 12)
        hashes.append(cache._cached_pages[r].hashes)
    assert len(hashes[0]) == 3
    assert not set(hashes[0]) & set(hashes[1])
    cache = cache_of()
    cache.match(r := request([*TEXT, 1]))
    cache._cached_pages[r].hashes[0] = b"made before"
    cache.match(r)
    assert cache._cached_pages[r].hashes[0] == b"made before"
    cache.forget(r)
    assert not cache._cached_pages, "nothing stays of a request that has ended"


def test_prompt_logprobs_want_every_row() -> None:
    cache = cache_of()
    wanting = make_request(0, TEXT, Sampling(prompt_logprobs=1))
    fill(cache, wanting, 12)
    assert cache.match(request(TEXT)).pages == (1, 2), "what it computed is found by others"
    assert cache.match(make_request(0, TEXT, Sampling(prompt_logprobs=1))) == PrefixHit()


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning() -> None:
    cache = cache_of(num_pages=9)
    a, b = fill(cache, request(TEXT), 12), fill(cache, request([50, *TEXT], slot=1), 12)
    for r in (a, b):
        cache.release(r, is_finished=True)
    again = request([*TEXT[:8], 99], slot=2)
    start(cache, again)  # a's first two pages are used again
    cache.release(again, is_finished=True)
    gone = []
    forget = cache.allocator.on_evict
    cache.allocator.on_evict = lambda page: (gone.append(page), forget(page))[0]
    cache.allocator.grow([], 8 * PAGE)
    assert gone == [3, 6, 5, 4, 2, 1]
    cache.check_integrity()


def test_nothing_is_evicted_while_pages_are_free() -> None:
    cache = cache_of(num_pages=9)
    cache.release(fill(cache, request(TEXT), 12), is_finished=True)
    table: list[int] = []
    cache.allocator.grow(table, 5 * PAGE)
    assert cache.match(request(TEXT)).pages == (1, 2)
    cache.allocator.grow(table, 6 * PAGE)
    assert cache.allocator.num_cached == 2
    with pytest.raises(OutOfPagesError, match="3 pages wanted, 2 free"):
        cache.allocator.grow(table, 9 * PAGE)
    assert cache.match(request(TEXT)).pages == (1, 2)


def test_a_text_whose_beginning_was_evicted_brings_it_back_when_it_ends() -> None:
    """Its copy of the first page replaces the evicted one; otherwise no hit could reach the pages after it."""
    cache = cache_of(num_pages=8)
    first, second = fill(cache, request(TEXT[:4]), 4), fill(cache, request([*TEXT, 1], slot=1), 12)
    cache.release(first, is_finished=True)
    cache.allocator.grow(table := [], 4 * PAGE)
    assert not cache.match(request(TEXT)).pages
    cache.release(second, is_finished=True)
    assert cache.match(request([*TEXT, 2])).pages == (2, 3, 4)
    cache.allocator.free(table)


class TestDraftMemory:
    def test_a_drafter_that_rereads_takes_every_page_and_gets_the_valid_length(self) -> None:
        owner = Owner()
        cache = cache_of(owner=owner)
        first = fill(cache, request([*TEXT, 1]), 12)
        owner.draft_kv.num_valid[0] = 7
        cache.release(first, is_finished=True)
        again = request([*TEXT, 2], slot=3)
        hit = cache.match(again)
        assert hit == PrefixHit((1, 2, 3), 1)
        start(cache, again)
        assert owner.draft_kv.num_valid[3] == 4

    def test_a_drafter_that_cannot_reread_takes_only_what_is_right(self) -> None:
        owner = Owner(lookahead=1)
        cache = cache_of(owner=owner)
        first = fill(cache, request([*TEXT, 1]), 12)
        owner.draft_kv.num_valid[0] = 9
        cache.release(first, is_finished=True)
        assert cache.match(request([*TEXT, 1])) == PrefixHit((1, 2), 2)

    def test_while_drafting_rests_its_missing_entries_shorten_no_hit(self) -> None:
        owner = Owner(lookahead=1)
        cache = cache_of(owner=owner)
        cache.release(fill(cache, request([*TEXT, 1]), 12), is_finished=True)
        assert cache.match(request([*TEXT, 1])) == PrefixHit()
        owner.draft_kv.is_resting = True
        again = start(cache, request([*TEXT, 1], slot=2))
        assert again.pages == [1, 2, 3]
        assert owner.draft_kv.num_valid.get(2, 0) == 0, "the request cannot draft"

    def test_the_last_pair_of_a_page_was_made_with_the_token_that_follows_it(self) -> None:
        """Two texts that differ from the end of a page share its tokens, and all its pairs but one."""
        owner = Owner(lookahead=1)
        cache = cache_of(owner=owner)
        first = fill(cache, request([*TEXT[:8], 1, 2, 3, 4, 5]), 12)
        owner.draft_kv.num_valid[0] = 12
        cache.release(first, is_finished=True)
        assert cache.match(request([*TEXT[:8], 1, 2])).pages == (1, 2)
        assert cache.match(request([*TEXT[:8], 7, 2])).pages == (1,)

    def test_a_page_written_before_another_continued_it_is_recognised_by_its_own_follower(self) -> None:
        """The page after it in the cache is another request's: it matches, and still the pair between is wrong."""
        owner = Owner(lookahead=1)
        cache = cache_of(owner=owner)
        first = fill(cache, request([*TEXT[:4], 1, 2]), 5)
        owner.draft_kv.num_valid[0] = 5
        cache.release(first, is_finished=True)
        second = request([*TEXT, 1], slot=1)
        assert cache.match(second) == PrefixHit()
        fill(cache, second, 12)
        owner.draft_kv.num_valid[1] = 12
        cache.release(second, is_finished=True)
        assert cache.match(request([*TEXT, 1])) == PrefixHit()

    def test_a_page_without_draft_memory_gives_way_to_an_equal_one_with_it(self) -> None:
        """Otherwise one request without drafts would keep a drafter from every later hit."""
        owner = Owner(lookahead=1)
        cache = cache_of(owner=owner)
        first = fill(cache, request([*TEXT, 1]), 12)
        cache.release(first, is_finished=True)
        assert cache.match(request([*TEXT, 1])) == PrefixHit()
        second = fill(cache, request([*TEXT, 1], slot=1), 12)
        owner.draft_kv.num_valid[1] = 12
        cache.release(second, is_finished=True)
        assert cache.match(request([*TEXT, 1])) == PrefixHit((4, 5, 6), 3)
        cache.check_integrity()
        assert cache.allocator.num_cached == 3

    def test_what_a_running_request_put_off_is_read_in_for_a_hit(self) -> None:
        owner = Owner(lookahead=1)
        cache = cache_of(owner=owner)
        fill(cache, request([*TEXT, 1], slot=4), 12)
        again = request([*TEXT, 1])
        assert cache.match(again) == PrefixHit()
        assert cache.find_unrecorded_slots(again) == [4]
        owner.draft_kv.num_valid[4] = 12  # as a flush does
        assert cache.match(again).num_draft_pages == 3
        assert cache.find_unrecorded_slots(again) == []

    def test_a_drafter_that_was_given_up_limits_nothing(self) -> None:
        owner = Owner(lookahead=1)
        cache = cache_of(owner=owner)
        fill(cache, request([*TEXT, 1]), 12)
        owner.draft_kv = None
        assert cache.match(request([*TEXT, 1])) == PrefixHit((1, 2, 3))

    def test_a_page_that_is_used_again_for_other_tokens_has_lost_its_note(self) -> None:
        """The same pages, and the same tokens after each of them."""
        owner = Owner(lookahead=1)
        cache = cache_of(num_pages=4, owner=owner)
        first = fill(cache, request([*TEXT, 1]), 12)
        owner.draft_kv.num_valid[0] = 12
        cache.release(first, is_finished=True)
        owner.draft_kv.num_valid.clear()
        other = [99, *TEXT[1:], 1]
        second = fill(cache, request(other, slot=1), 12)
        assert second.pages == [1, 2, 3]
        cache.release(second, is_finished=True)
        assert cache.match(request(other)) == PrefixHit()
        cache.check_integrity()


def test_pages_that_are_not_kept_cannot_be_taken() -> None:
    allocator = PageAllocator(5, PAGE)
    allocator.grow(table := [], 4)
    with pytest.raises(ValueError, match="page 1 is not cacheable"):
        allocator.acquire(table)
    with pytest.raises(ValueError, match="page 2 is not in use"):
        allocator.mark_cacheable(2)


def test_clear_forgets_everything() -> None:
    cache = cache_of()
    fill(cache, request(TEXT), 12)
    cache.clear()
    assert not cache.match(request(TEXT)).pages
    assert cache.allocator.num_free == 19
    cache.allocator.check_integrity([])
