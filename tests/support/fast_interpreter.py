"""Triton's interpreter with less work in calls between device functions.

Every such call patches the language anew, which takes two thirds of the time of a kernel made of small functions.
"""

from typing import Any
from unittest import mock

from triton.runtime import interpreter


def patch_language_once() -> Any:
    """Return a context in which a device function patches the language at its first call in a file alone."""
    ready: set[int] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in ready:
            ready.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    return mock.patch.object(interpreter.InterpretedFunction, "__call__", call)
