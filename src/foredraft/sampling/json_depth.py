"""Nesting depth of JSON before it is parsed.

json.loads has a limit of its own, which depends on Python's version: 1,000 levels in 3.11, and the size of the
thread's stack in 3.14.
"""

import re

import numpy as np

# A JSON string without escaped characters. An unterminated string matches to the end, because a search that restarts at
# every quote would take quadratic time.
STRING_PATTERN = re.compile(rb'"[^"]*+(?:"|\Z)')

_DEPTH_STEPS = bytes.maketrans(b"[{]}", bytes([1, 1, 255, 255]))  # change of depth as int8: +1 or -1
_NON_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


def remove_escapes(source: bytes) -> bytes:
    """Remove escaped backslashes and quotes, so that STRING_PATTERN finds the strings.

    Two replacements take a fifth of the time of a pattern that skips escaped characters.
    """
    return source.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in source else source


def measure_depth(structure: bytes) -> int:
    """Compute the nesting depth of brackets in JSON whose strings were removed. Other input gives any number."""
    steps = np.frombuffer(structure.translate(_DEPTH_STEPS, _NON_BRACKETS), dtype=np.int8)
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))
