"""Methods that are handed down: what holds its own caller is freed by the cyclic collector alone."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakMethod

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """A bound method that does not keep its object alive. Call it only while something else does."""
    held = WeakMethod(method)

    def call(*args: P.args, **options: P.kwargs) -> R:
        found = held()
        assert found is not None, "the object of a method that is still called is gone"
        return found(*args, **options)

    return call
