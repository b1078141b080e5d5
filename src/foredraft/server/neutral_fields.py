"""Fields of other APIs: neutral values are dropped, others are refused with what to do."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from foredraft.server.errors import ApiError, quote_name


def drop_neutral(
    data: Mapping[str, Any],
    fields: Collection[str],
    neutral_values: Mapping[str, Sequence[Any]],
    fixes: Mapping[str, str] = MappingProxyType({}),
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Drop the unimplemented fields of a body that have a neutral value.

    Args:
        data: the body.
        fields: names of the implemented fields.
        neutral_values: unimplemented field -> values at which it has no effect.
        fixes: unimplemented field -> what to do. Default none: it may be left out.
        renamed: field of another route -> its name in this one. Default none.

    Raises:
        ApiError: an unimplemented field has another value, or a field has its name in another route.
    """
    kept = {}
    for name, value in data.items():
        if name in renamed:
            raise ApiError(400, f"{name} is called {renamed[name]} in this route", name)
        if name in fields or name not in neutral_values:
            kept[name] = value
        elif not any(type(value) is type(other) and value == other for other in neutral_values[name]):
            fix = fixes.get(name, "leave it out")
            raise ApiError(400, f"{quote_name(name)} is not implemented; {fix}", name)
    return kept
