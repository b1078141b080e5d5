"""Bounded store of past outputs for suffix decoding. The oldest are evicted first; tenants are separate."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest

from foredraft.drafters.suffix.automaton import TEXT_BREAK, SuffixAutomaton, SuffixMatch

NUM_SECTIONS = 4  # of the store; an automaton cannot remove tokens, so 1/4 of the capacity is evicted at once
MAX_SECTION_MATCHES = 1  # sections that a draft reads; each costs a lookup per node, and the longest match wins


def select_longest(matches: Iterable[SuffixMatch]) -> list[SuffixMatch]:
    """Return the MAX_SECTION_MATCHES longest matches; the first of equal ones."""
    return nlargest(MAX_SECTION_MATCHES, matches, key=_get_length)


def _get_length(match: SuffixMatch) -> int:
    return match.length


@dataclass(eq=False)
class SuffixCacheSection:
    """Outputs of one tenant in one automaton, in order, with TEXT_BREAK after each."""

    automaton: SuffixAutomaton
    version: int = 0  # incremented when the automaton grows; older matches are then stale
    num_outputs: int = 0  # outputs that end in this section


class SuffixCache:
    """Store of past outputs by tenant; a tenant is a request's cache salt.

    A section belongs to one tenant, and sections are only reachable by `list_sections(tenant)`.

    Args:
        capacity: tokens in all sections, breaks included.
        max_tenants: most tenants.
        make_automaton: constructor of an empty automaton.
        max_outputs: most outputs; None = limited by `capacity` alone.
    """

    def __init__(
        self,
        capacity: int,
        max_tenants: int,
        make_automaton: Callable[[], SuffixAutomaton],
        max_outputs: int | None = None,
    ) -> None:
        self.capacity = capacity
        self.max_tenants = max_tenants
        self.max_outputs = max_outputs
        self._make_automaton = make_automaton
        # the last writer is last
        self._sections_by_tenant: OrderedDict[bytes, list[SuffixCacheSection]] = OrderedDict()
        # all sections; the last one written is last
        self._tenant_by_section: OrderedDict[SuffixCacheSection, bytes] = OrderedDict()
        self._section_size = max(2, capacity // NUM_SECTIONS)
        self._section_outputs = None if max_outputs is None else max(1, max_outputs // NUM_SECTIONS)

    @property
    def num_tokens(self) -> int:
        return sum(len(section.automaton) for section in self._tenant_by_section)

    @property
    def num_outputs(self) -> int:
        return sum(section.num_outputs for section in self._tenant_by_section)

    @property
    def num_tenants(self) -> int:
        return len(self._sections_by_tenant)

    @property
    def num_bytes(self) -> int:
        return sum(section.automaton.num_bytes for section in self._tenant_by_section)

    def list_sections(self, tenant: bytes) -> Sequence[SuffixCacheSection]:
        """Return the sections of one tenant, the newest first."""
        return self._sections_by_tenant.get(tenant, [])[::-1]

    def add(self, tenant: bytes, tokens: Sequence[int]) -> None:
        """Add one output. A long output spans several sections; the oldest sections are evicted."""
        offset = 0
        while offset < len(tokens):
            section = self._open_section(tenant)
            piece = tokens[offset : offset + self._section_size - len(section.automaton) - 1]
            section.automaton.extend([*piece, TEXT_BREAK])
            section.version += 1
            self._tenant_by_section.move_to_end(section)
            offset += len(piece)
            section.num_outputs += offset == len(tokens)
            while self._is_over_limit():
                self._evict(next(iter(self._tenant_by_section)))

    def _is_over_limit(self) -> bool:
        return self.num_tokens > self.capacity or (self.max_outputs is not None and self.num_outputs > self.max_outputs)

    def _is_full(self, section: SuffixCacheSection) -> bool:
        """Return whether a section has no room for a token and a break, or for a further output."""
        return len(section.automaton) + 2 > self._section_size or (
            self._section_outputs is not None and section.num_outputs >= self._section_outputs
        )

    def _open_section(self, tenant: bytes) -> SuffixCacheSection:
        """Return the tenant's last section if it has room, else a new one."""
        sections = self._sections_by_tenant.setdefault(tenant, [])
        self._sections_by_tenant.move_to_end(tenant)
        while len(self._sections_by_tenant) > self.max_tenants:
            for section in list(next(iter(self._sections_by_tenant.values()))):
                self._evict(section)
        if not sections or self._is_full(sections[-1]):
            sections.append(SuffixCacheSection(self._make_automaton()))
            self._tenant_by_section[sections[-1]] = tenant
        return sections[-1]

    def _evict(self, section: SuffixCacheSection) -> None:
        tenant = self._tenant_by_section.pop(section)
        self._sections_by_tenant[tenant].remove(section)
        if not self._sections_by_tenant[tenant]:
            del self._sections_by_tenant[tenant]
