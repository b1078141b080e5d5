"""Past outputs to draft from: bounded, the oldest evicted first, and never looked up across tenants."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest

from foredraft.kernels.automaton import BREAK, Automaton, Place

PARTS = 4  # of the store: nothing can be taken out of an automaton, so a quarter of the tokens goes at once
BEST = 1  # sections that a draft looks at: every one costs a look per node, and the longest match wins


def best(places: Iterable[Place]) -> list[Place]:
    """Those of the longest matches, of equal ones the first."""
    return nlargest(BEST, places, key=_length)


def _length(place: Place) -> int:
    return place.length


@dataclass(eq=False)
class Section:
    """Some outputs of one tenant, in order, a BREAK after each."""

    text: Automaton
    version: int = 0  # grows when it does: where a text stands in it has to be found anew then


class Store:
    """`capacity` tokens (breaks included) of at most `most_tenants` tenants; a tenant is a caller's salt.

    Sections know one tenant each, and `sections` is the only way to them: what a salt cannot name it cannot draft.
    """

    def __init__(self, capacity: int, most_tenants: int, make: Callable[[], Automaton]) -> None:
        self.capacity = capacity
        self.most_tenants = most_tenants
        self._make = make
        self._tenants: OrderedDict[bytes, list[Section]] = OrderedDict()  # who wrote last is last
        self._written: OrderedDict[Section, bytes] = OrderedDict()  # every section, that last written to last
        self._size = max(2, capacity // PARTS)

    @property
    def num_tokens(self) -> int:
        return sum(len(section.text) for section in self._written)

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    @property
    def num_bytes(self) -> int:
        return sum(section.text.num_bytes for section in self._written)

    def sections(self, tenant: bytes) -> Sequence[Section]:
        """Those of one tenant, the newest first."""
        return self._tenants.get(tenant, [])[::-1]

    def add(self, tenant: bytes, tokens: Sequence[int]) -> None:
        """One output; what is longer than a section goes on in the next, and the oldest make room."""
        at = 0
        while at < len(tokens):
            section = self._open(tenant)
            piece = tokens[at : at + self._size - len(section.text) - 1]
            section.text.extend([*piece, BREAK])
            section.version += 1
            self._written.move_to_end(section)
            at += len(piece)
            while self.num_tokens > self.capacity:
                self._evict(next(iter(self._written)))

    def _open(self, tenant: bytes) -> Section:
        """One with room for a token and its break."""
        mine = self._tenants.setdefault(tenant, [])
        self._tenants.move_to_end(tenant)
        while len(self._tenants) > self.most_tenants:
            for section in list(next(iter(self._tenants.values()))):
                self._evict(section)
        if not mine or len(mine[-1].text) + 2 > self._size:
            mine.append(Section(self._make()))
            self._written[mine[-1]] = tenant
        return mine[-1]

    def _evict(self, section: Section) -> None:
        tenant = self._written.pop(section)
        self._tenants[tenant].remove(section)
        if not self._tenants[tenant]:
            del self._tenants[tenant]
