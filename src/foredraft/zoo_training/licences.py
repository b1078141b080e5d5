"""Check of a distribution's licence: the built-in models are trained on permissively licensed code only.

The licence is read from the metadata. A distribution without a licence, or with one not on the list, is refused.
"""

import re
from email.message import Message

# SPDX ids. An exception after WITH only adds permissions, so it is not checked.
ALLOWED = frozenset(
    "0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python ISC MIT MIT-CMU PSF-2.0 Python-2.0 "
    "Unlicense Zlib".split()
)
# Trove classifier without the prefix "License :: OSI Approved :: " -> SPDX id or name of a family.
CLASSIFIERS = {
    "MIT License": "MIT",
    "BSD License": "BSD",
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "zlib/libpng License": "Zlib",
}
# Value of the field `License` of older metadata, in lower case -> SPDX id or name of a family.
FREE_TEXT = {
    "mit": "MIT",
    "mit license": "MIT",
    "bsd": "BSD",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "isc license": "ISC",
}
_OSI = "License :: OSI Approved :: "


def find_permissive_licence(metadata: Message) -> str | None:
    """Return the licence of a distribution; None if it is not allowed.

    It is read from the SPDX expression if there is one, else from the classifiers, else from the field `License`.
    """
    expression = metadata.get("License-Expression")
    if expression is not None:
        return expression if is_allowed(expression) else None
    classifiers = [text.removeprefix(_OSI) for text in metadata.get_all("Classifier") or [] if text.startswith(_OSI)]
    if classifiers:
        names = [CLASSIFIERS.get(text) for text in classifiers]
        return " AND ".join(name for name in names if name is not None) if all(names) else None
    return FREE_TEXT.get(str(metadata.get("License") or "").strip().lower())


def is_allowed(expression: str) -> bool:
    """Return whether an SPDX expression is allowed: all licences joined by AND, at least one joined by OR."""
    tokens = re.findall(r"[()]|[^\s()]+", expression)
    allowed, rest = _parse_any(tokens)
    return allowed and not rest


def _parse_any(tokens: list[str]) -> tuple[bool, list[str]]:
    """Parse alternatives joined by OR; return whether one is allowed, and the remaining tokens."""
    allowed, tokens = _parse_all(tokens)
    while tokens and tokens[0].upper() == "OR":
        other, tokens = _parse_all(tokens[1:])
        allowed = allowed or other
    return allowed, tokens


def _parse_all(tokens: list[str]) -> tuple[bool, list[str]]:
    """Parse licences joined by AND; return whether all are allowed, and the remaining tokens."""
    allowed, tokens = _parse_licence(tokens)
    while tokens and tokens[0].upper() == "AND":
        other, tokens = _parse_licence(tokens[1:])
        allowed = allowed and other
    return allowed, tokens


def _parse_licence(tokens: list[str]) -> tuple[bool, list[str]]:
    """Parse a licence with an optional exception, or an expression in parentheses."""
    if not tokens:
        return False, []
    if tokens[0] == "(":
        allowed, rest = _parse_any(tokens[1:])
        return (allowed, rest[1:]) if rest[:1] == [")"] else (False, rest)
    allowed, rest = tokens[0] in ALLOWED, tokens[1:]
    return allowed, rest[2:] if rest[:1] and rest[0].upper() == "WITH" else rest
