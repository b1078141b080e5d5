"""Choice of the cases that `make test` leaves to `make test-rest` and `make test-wide`.

Tests run whole unless this file lists them, so a new test is always part of `make test`. A listed function keeps some
of its cases there. They are chosen by their identifiers: of all parts of identifiers that occur in its listed functions
of a file, those that were chosen least come first. So each method, rule and setting of the file stays in `make test`.
`make test-rest` runs more of them, up to REST_SECONDS of each function, `make test-wide` what remains, and
`make test-all` every case.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import pytest

MARK, WIDE_MARK = "rest", "wide"
REST_SECONDS = 1.0  # processor time of a function in `make test-rest`, as the table estimates it
COLLECTED = pytest.StashKey[tuple[pytest.Item, ...]]()  # all cases, before `-m` deselects


@dataclass(frozen=True)
class Sample:
    """Part of a test function that stays in `make test`."""

    num_kept: int  # cases; 0 if the function is slow and another one tests the same in less time
    seconds: float  # processor time of all cases
    reason: str = ""

    def count_rest(self, num_cases: int) -> int:
        """Count the cases for `make test-rest`: at least one if `make test` has none."""
        affordable = int(REST_SECONDS * num_cases / self.seconds)
        return min(num_cases - self.num_kept, max(affordable, int(self.num_kept == 0)))


def get_parts(identifier: str) -> set[str]:
    """Return the settings of a case; of `method, variant` the method."""
    return {setting.partition(",")[0] for setting in identifier.split("-")}


def choose_cases(identifiers: Sequence[str], num_kept: int, num_uses: Counter[str]) -> set[int]:
    """Choose cases whose parts are new, or were chosen least so far.

    Args:
        identifiers: of all cases, parts separated by hyphens.
        num_kept: number of cases to choose.
        num_uses: how often each part and each identifier was chosen before; updated.

    Returns:
        Indices of the chosen cases.
    """
    parts = [get_parts(identifier) for identifier in identifiers]

    def rank(i: int) -> tuple[int, int, int, int]:
        num_new = sum(not num_uses[part] for part in parts[i])
        return -num_new, sum(num_uses[part] for part in parts[i]), num_uses[identifiers[i]], i

    left = set(range(len(identifiers)))
    chosen: set[int] = set()
    while left and len(chosen) < num_kept:
        best = min(left, key=rank)
        left.remove(best)
        chosen.add(best)
        num_uses.update({*parts[best], identifiers[best]})
    return chosen


def group_by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Group cases by `file::function`, long runs (`make soak`) left out."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("soak") is None:
            groups[item.nodeid.partition("[")[0]].append(item)
    return groups


def get_identifier(item: pytest.Item) -> str:
    """Return what the node's name has in brackets."""
    return item.name.partition("[")[2].removesuffix("]")


def divide_cases(
    items: Iterable[pytest.Item], samples: Mapping[str, Sample]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Find the cases that `make test` leaves to `make test-rest`, and those for `make test-wide`."""
    num_uses: dict[str, Counter[str]] = defaultdict(Counter)  # by file
    groups = {name: cases for name, cases in group_by_function(items).items() if name in samples}

    def take(function: str, cases: list[pytest.Item], count: int) -> list[pytest.Item]:
        """Choose cases. Returns those that remain."""
        chosen = choose_cases([get_identifier(c) for c in cases], count, num_uses[function.partition("::")[0]])
        return [case for i, case in enumerate(cases) if i not in chosen]

    later = {name: take(name, cases, samples[name].num_kept) for name, cases in groups.items()}
    wide = {name: take(name, cases, samples[name].count_rest(len(groups[name]))) for name, cases in later.items()}
    rest = [case for name, cases in later.items() for case in cases if case not in wide[name]]
    return rest, list(chain.from_iterable(wide.values()))
