"""A drafter as a user names it, and how long its drafts may be."""

from typing import Any

from foredraft.drafters.base import Drafter, methods
from foredraft.errors import ForedraftError

DrafterSpec = None | str | dict[str, Any] | Drafter
AUTO = "auto"  # a draft length found by measurement...
AUTO_TOKENS = 8  # ... and the longest it may be
DraftLength = int | str | None


def draft_length(spec: DrafterSpec, asked: DraftLength) -> int | None:
    """The longest draft, or None where it is to be found by measurement."""
    given = spec.get("num_speculative_tokens", AUTO) if isinstance(spec, dict) else AUTO
    count = given if asked in (AUTO, None) else asked
    if count in (AUTO, None):
        return None
    if not isinstance(count, int) or isinstance(count, bool):
        raise ForedraftError(f"num_speculative_tokens must be an integer or 'auto', got {count!r}")
    return count


def longest_draft(spec: DrafterSpec) -> int:
    """The longest draft where measurement finds the length; a method that lives from long ones names its own."""
    method = spec.get("method") if isinstance(spec, dict) else spec
    module = methods().get(method) if isinstance(method, str) else None
    return int(getattr(module, "AUTO_TOKENS", AUTO_TOKENS))
