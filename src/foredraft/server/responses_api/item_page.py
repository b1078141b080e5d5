"""Page of a list of items."""

from dataclasses import dataclass
from typing import Any

from foredraft.server.errors import ApiError, quote_name

MAX_LIMIT, DEFAULT_LIMIT, DEFAULT_ORDER = 100, 20, "desc"


@dataclass(frozen=True)
class ItemPage:
    """Part of a list that a client asks for."""

    limit: int
    is_ascending: bool  # the first item comes first
    after: str | None  # id of the item before the page; None = it is the first page

    def cut(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Cut the page out of a list. Raises ApiError if it has no item `after`."""
        rows = items if self.is_ascending else items[::-1]
        if self.after is not None:
            place = next((i for i, row in enumerate(rows) if row["id"] == self.after), None)
            if place is None:
                raise ApiError(400, f"after: there is no item {quote_name(self.after)}", "after")
            rows = rows[place + 1 :]
        page = rows[: self.limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(rows),
        }


def read_page(limit: str, order: str, after: str | None) -> ItemPage:
    """Read the parameters of a page. Raises ApiError for an invalid one.

    Args:
        limit: most items, in digits.
        order: "asc" or "desc".
        after: id of the item before the page; None = it is the first page.
    """
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_LIMIT):
        raise ApiError(400, f"limit must be a number from 1 to {MAX_LIMIT}", "limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order must be asc or desc", "order")
    return ItemPage(int(limit), order == "asc", after)
