"""Setting of the C library's allocator for training on a CPU."""

import ctypes

# parameters of mallopt(3)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make the allocator keep freed memory for later allocations.

    By default glibc returns every freed tensor of some megabytes to the system, and each page of the next one costs a
    page fault. Training steps allocate the same sizes again and again, so that they take a quarter less time without
    (dev/LOG.md). The process then holds its largest amount of memory to its end.

    Returns:
        Whether the setting took effect; False with a C library other than glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # other systems, and C libraries without it
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, NEVER))
