"""Weakly bound methods, to pass callbacks without a reference cycle.

An object in a cycle is freed only by the cyclic garbage collector, which is late for objects that hold memory pools.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakMethod

P = ParamSpec("P")
R = TypeVar("R")


def bind_weakly(method: Callable[P, R]) -> Callable[P, R]:
    """Return a function that calls a bound method without keeping its object alive.

    The object must exist at the call.
    """
    reference = WeakMethod(method)

    def call(*args: P.args, **options: P.kwargs) -> R:
        bound = reference()
        assert bound is not None, "the object of a method that is still called is gone"
        return bound(*args, **options)

    return call
