"""The prefix cache: full pages of committed tokens, found again by what is written in them. It has never seen a tensor.

A page is known by a hash over the hash of the page before it and its own tokens, so that one lookup speaks for the
whole text up to its end. The key of the hash is drawn at random per cache, and the chain begins with the request's
salt: who cannot read this process can neither make two texts collide nor tell whether another salt's text is here.

Draft KV lies on the same page ids. The cache notes for every page whether it is right there, and where the drafter
looks a token ahead (EAGLE's entry t is made with token t + 1) also which token followed when the last entry was made:
that token is no part of the page's hash.
"""

import os
from array import array
from dataclasses import dataclass
from hashlib import blake2b

from foredraft.kv.blocks import PageAllocator
from foredraft.kv.memory import DraftMemory, MemoryOwner, NoMemory
from foredraft.kv.weak import weakly
from foredraft.request import Request

HASH_BYTES = 16
ANY = -1  # the last entry of a page depends on no token beyond it


@dataclass(frozen=True)
class Hit:
    """Pages that hold the beginning of a text already."""

    pages: tuple[int, ...] = ()
    num_drafted: int = 0  # leading ones of them whose draft KV is right


class PrefixCache:
    """Every page it knows is kept by the allocator and was written by a request that committed all its tokens.

    is_active: False = nothing is ever found. is_shared: False = pages end with the request, unless another holds them
    still; samples of one prompt find each other's.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        owner: MemoryOwner | None = None,
        is_shared: bool = True,
        is_active: bool = True,
    ) -> None:
        self.allocator = allocator
        self.owner: MemoryOwner = NoMemory() if owner is None else owner
        self.is_shared = is_shared
        self.is_active = is_active
        self._key = os.urandom(32)
        self._forget_all()
        allocator.evicted = weakly(self._drop_note)

    def match(self, request: Request) -> Hit:
        """The longest hit that leaves the last token to compute. Takes nothing."""
        if not self.is_active or request.sampling.prompt_logprobs is not None:  # every row of that prompt is wanted
            return Hit()
        most = (request.num_tokens - 1) // self.allocator.page_size
        self._extend(request, most)
        pages, memory = self._pages(request, most), self.owner.memory
        if memory is None or not pages:
            return Hit(tuple(pages))
        if self._catch_up(pages):
            pages = self._pages(request, most)
        num_drafted = self._num_drafted(request, pages, memory)
        # a drafter that cannot read the rest in from tokens would never draft again
        return Hit(tuple(pages if memory.is_rereadable else pages[:num_drafted]), num_drafted)

    def take(self, request: Request, hit: Hit) -> None:
        """The request begins with a hit."""
        if not hit.pages:
            return
        size, memory = self.allocator.page_size, self.owner.memory
        self.allocator.hold(hit.pages)
        request.pages += hit.pages
        request.num_sealed = request.num_found = len(hit.pages)
        request.computed = len(hit.pages) * size
        if memory is not None and hit.num_drafted:
            memory.valid[request.slot] = hit.num_drafted * size
            request.num_noted = hit.num_drafted

    def insert(self, request: Request) -> None:
        """Take up the pages that the request has filled with committed tokens; of equal ones the first stays."""
        if not self.is_active:
            return
        full = request.computed // self.allocator.page_size
        self._extend(request, full)
        for i in range(request.num_sealed, full):
            digest = request.hashes[i]
            if digest not in self._page_of:
                self._put(digest, request.pages[i], request)
        request.num_sealed = full
        self._note(request)

    def leave(self, request: Request, is_over: bool, is_poisoned: bool = False) -> None:
        """Free what the request holds. is_over: it does not come back. is_poisoned: its logits were no law, so nothing
        that it wrote, or that nobody else could read, is trusted."""
        if is_poisoned:
            self._poisoned(request)
        elif is_over and not self.is_shared:
            self._drop_own(request)
        elif request.num_sealed:
            self.owner.settle([request.slot])
            self._note(request)
            self._restore(request)
        self._free(request)
        if is_over:
            request.inserted.clear()

    def clear(self) -> None:
        """Forget everything; every page is free, so all block tables must be emptied too."""
        self._forget_all()
        self.allocator.reset()

    def check_integrity(self) -> None:
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of, "a page has two hashes"
        assert all(map(self.allocator.is_kept, self._digest_of)), "a known page may be given away"
        assert self._followers.keys() <= self._digest_of.keys(), "draft KV is noted for a page that is not known"
        assert self._writers.keys() <= self._digest_of.keys(), "the writer of a page is noted that is not known"

    def _forget_all(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._followers: dict[int, int] = {}  # pages with right draft KV -> the token after them, or ANY
        self._writers: dict[int, Request] = {}  # who filled a page, while it runs

    def _extend(self, request: Request, num_pages: int) -> None:
        """Hashes of the request's first pages, each made once."""
        hashes, size = request.hashes, self.allocator.page_size
        if len(hashes) >= num_pages:
            return
        last = hashes[-1] if hashes else blake2b(request.salt, key=self._key, digest_size=HASH_BYTES).digest()
        for i in range(len(hashes), num_pages):
            tokens = array("q", request.slice(i * size, (i + 1) * size)).tobytes()
            last = blake2b(last + tokens, key=self._key, digest_size=HASH_BYTES).digest()
            hashes.append(last)

    def _put(self, digest: bytes, page: int, writer: Request) -> None:
        self._page_of[digest] = page
        self._digest_of[page] = digest
        self._writers[page] = writer
        writer.inserted.add(digest)
        self.allocator.keep(page)

    def _drop(self, page: int) -> None:
        self._drop_note(page)
        self.allocator.drop(page)

    def _drop_note(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]
        self._followers.pop(page, None)
        self._writers.pop(page, None)

    def _pages(self, request: Request, most: int) -> list[int]:
        pages: list[int] = []
        for digest in request.hashes[:most]:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def _catch_up(self, pages: list[int]) -> bool:
        """Have running writers read in what they put off. Whether anything may have changed."""
        late = {self._writers[page]: None for page in pages if page in self._writers and page not in self._followers}
        self.owner.settle([writer.slot for writer in late])
        for writer in late:
            self._note(writer)
        return bool(late)

    def _num_drafted(self, request: Request, pages: list[int], memory: DraftMemory) -> int:
        """Leading pages whose draft KV is right for this request."""
        for i, page in enumerate(pages):
            if self._followers.get(page) != self._follower(request, i, memory):
                return i
        return len(pages)

    def _follower(self, request: Request, i: int, memory: DraftMemory) -> int:
        return request.token((i + 1) * self.allocator.page_size) if memory.lookahead else ANY

    def _note(self, request: Request) -> None:
        """Which of the request's pages have right draft KV by now."""
        memory = self.owner.memory
        if memory is None:
            return
        valid = memory.valid.get(request.slot, 0) // self.allocator.page_size
        for i in range(request.num_noted, min(valid, request.num_sealed)):
            page, digest = request.pages[i], request.hashes[i]
            known = self._page_of.get(digest)
            if known is not None and known != page and known not in self._followers:
                # the first page stays only as long as it is no worse
                self._drop(known)
                self._put(digest, page, request)
                known = page
            if known == page:
                self._followers.setdefault(page, self._follower(request, i, memory))
            request.num_noted = i + 1

    def _restore(self, request: Request) -> None:
        """Pages equal to the request's own may have been evicted since: then its own take their place. Those it found
        are known as long as it holds them, unless whoever wrote them failed."""
        for i in range(request.num_found, request.num_sealed):
            if request.hashes[i] not in self._page_of:
                self._put(request.hashes[i], request.pages[i], request)

    def _poisoned(self, request: Request) -> None:
        for digest in request.inserted:
            if digest in self._page_of:
                self._drop(self._page_of[digest])
        self._drop_own(request)

    def _drop_own(self, request: Request) -> None:
        for page in request.pages:
            if page in self._digest_of and self.allocator.num_holders(page) == 1:
                self._drop(page)

    def _free(self, request: Request) -> None:
        """From the end, so that a page is never older than those after it."""
        for i in reversed(range(len(request.pages))):
            page = request.pages[i]
            if self._writers.get(page) is request:
                del self._writers[page]
            self.allocator.free([page])
            if i < request.num_sealed:
                known = self._page_of.get(request.hashes[i], page)
                if known != page:
                    self.allocator.touch(known)
        request.pages.clear()
        request.num_found = request.num_sealed = request.num_noted = request.computed = 0
