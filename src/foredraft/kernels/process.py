"""Detection of a fork after first use: a fork copies the memory but not the threads of torch and the native code.

In a forked child a forward pass would wait forever for threads of the parent, in torch's operators too. Reloading the
library does not help, so use after a fork is refused.
"""

import os
from functools import cache

from foredraft.errors import ForedraftError


@cache
def get_first_process_id() -> int:
    """Return the id of the first process that calls this; forked children inherit the cached value."""
    return os.getpid()


def is_forked() -> bool:
    """Return whether a parent of this process has used Foredraft."""
    return os.getpid() != get_first_process_id()


def check_process() -> None:
    """Raise ForedraftError in a process that was forked from one that has used Foredraft."""
    if is_forked():
        raise ForedraftError(
            "Foredraft was used before this process was forked, and its threads do not exist here; start the process "
            "with multiprocessing.get_context('spawn'), or make the first LLM after the fork"
        )
