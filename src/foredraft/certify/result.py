"""Result of one check of a certificate."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        name: what was checked.
        is_passed: whether nothing was found, on enough evidence.
        evidence: one line: what was compared, and what was found.
        figures: the same in numbers.
    """

    name: str
    is_passed: bool
    evidence: str
    figures: Mapping[str, Any] = field(default_factory=dict)
