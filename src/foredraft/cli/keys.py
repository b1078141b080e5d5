"""Keys of a server, from an option or an environment variable."""

import os

from foredraft.cli.shell import UsageError


def read_key(title: str, option: str, given: str | None, variable: str) -> str | None:
    """Return the key of an option or of its environment variable. Raises UsageError for an invalid one."""
    key = given if given is not None else os.environ.get(variable)
    key = None if key is None else key.strip()  # a key that was read from a file ends with a line break
    if key == "":
        raise UsageError(f"the {title} key is empty; give {option} or {variable} a value, or leave it out")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"the {title} key has characters that an HTTP header cannot have; give {option} or {variable} in ASCII"
        )
    return key
