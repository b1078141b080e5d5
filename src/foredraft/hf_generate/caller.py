"""Read arguments that transformers' `generate` does not pass to a custom decoding loop.

transformers 5 hands a custom loop only arguments that its own loop lacks. `streamer` and `assistant_model` stay behind
as local variables of `generate`, so they are read from its frame. If the frame is not on the stack (a later release may
be built differently), nothing is read.
"""

import inspect
import sys
from dataclasses import dataclass
from typing import Any

from transformers.generation.utils import GenerationMixin

MAX_FRAMES = 8  # between the loop and generate(): decorators


@dataclass(frozen=True)
class CallerArguments:
    """Arguments of the `generate` call that runs a loop."""

    streamer: Any
    assistant_model: Any


def read_caller(loop: Any) -> CallerArguments | None:
    """Return the arguments of the `generate` call that runs `loop`; None if no such call is on the stack."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame.f_code is code and frame.f_locals.get("custom_generate") is loop:
            return CallerArguments(frame.f_locals.get("streamer"), frame.f_locals.get("assistant_model"))
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
