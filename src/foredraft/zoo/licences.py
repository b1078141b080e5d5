"""Which licences the built-in models may learn under, read from a distribution's metadata.

Only permissive licences are allowed. Metadata that names none, or one that is not on the list, is a refusal.
"""

import re
from email.message import Message

# SPDX ids; an exception after WITH only ever permits more
ALLOWED = frozenset(
    "0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python ISC MIT MIT-CMU PSF-2.0 Python-2.0 "
    "Unlicense Zlib".split()
)
# trove classifiers after "License :: OSI Approved :: "
CLASSIFIERS = {
    "MIT License": "MIT",
    "BSD License": "BSD",
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "zlib/libpng License": "Zlib",
}
# what older metadata writes into its free field, in small letters
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
    """The licence from SPDX expression, classifiers or free field, whichever comes first; None if it is not allowed."""
    expression = metadata.get("License-Expression")
    if expression is not None:
        return expression if is_allowed(expression) else None
    classifiers = [text.removeprefix(_OSI) for text in metadata.get_all("Classifier") or [] if text.startswith(_OSI)]
    if classifiers:
        names = [CLASSIFIERS.get(text) for text in classifiers]
        return " AND ".join(name for name in names if name is not None) if all(names) else None
    return FREE_TEXT.get(str(metadata.get("License") or "").strip().lower())


def is_allowed(expression: str) -> bool:
    """Every part of an SPDX expression that applies is on the list; of alternatives one is enough."""
    tokens = re.findall(r"[()]|[^\s()]+", expression)
    allowed, rest = _parse_any(tokens)
    return allowed and not rest


def _parse_any(tokens: list[str]) -> tuple[bool, list[str]]:
    found, tokens = _parse_all(tokens)
    while tokens and tokens[0].upper() == "OR":
        other, tokens = _parse_all(tokens[1:])
        found = found or other
    return found, tokens


def _parse_all(tokens: list[str]) -> tuple[bool, list[str]]:
    found, tokens = _parse_licence(tokens)
    while tokens and tokens[0].upper() == "AND":
        other, tokens = _parse_licence(tokens[1:])
        found = found and other
    return found, tokens


def _parse_licence(tokens: list[str]) -> tuple[bool, list[str]]:
    if not tokens:
        return False, []
    if tokens[0] == "(":
        found, rest = _parse_any(tokens[1:])
        return (found, rest[1:]) if rest[:1] == [")"] else (False, rest)
    found, rest = tokens[0] in ALLOWED, tokens[1:]
    return found, rest[2:] if rest[:1] and rest[0].upper() == "WITH" else rest
