"""The process that native code and torch have their threads in: a fork takes the memory along and leaves them behind.

In a forked child a pass would wait for ever for threads of the parent, torch's own operators too, whatever is loaded
anew. So it is refused.
"""

import os
from functools import cache

from foredraft.errors import ForedraftError


@cache
def first_process() -> int:
    """The process that asked first; what it forks finds the answer here."""
    return os.getpid()


def is_forked() -> bool:
    """Whether a process before this one asked already."""
    return os.getpid() != first_process()


def check_process() -> None:
    """Raises ForedraftError in a process that was forked from one that has used Foredraft."""
    if is_forked():
        raise ForedraftError(
            "Foredraft was used before this process was forked, and its threads did not come along; start the process "
            "with multiprocessing.get_context('spawn'), or make the first LLM after the fork"
        )
