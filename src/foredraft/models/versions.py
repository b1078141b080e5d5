"""Releases of torch and transformers that Foredraft was tested with."""

import warnings
from importlib import metadata

NEWEST_TESTED = {"torch": (2, 13), "transformers": (5, 23)}  # the newest, as (major, minor)


def describe_untested(versions: dict[str, str]) -> list[str]:
    """One sentence for every package that is newer than what was tested; `versions` are those installed."""
    found = []
    for name, newest in NEWEST_TESTED.items():
        major, minor = (int(part) for part in versions[name].split("+")[0].split(".")[:2])
        if (major, minor) > newest:
            known = ".".join(map(str, newest))
            found.append(
                f"{name} {versions[name]} is newer than {known}, the last release tested; "
                f"if a model fails to load, pip install '{name}=={known}.*'"
            )
    return found


def read_installed_versions() -> dict[str, str]:
    """Versions of the packages that matter."""
    return {name: metadata.version(name) for name in NEWEST_TESTED}


def warn_if_untested() -> None:
    """Warn about installed packages that are newer than what was tested."""
    for sentence in describe_untested(read_installed_versions()):
        warnings.warn(sentence, stacklevel=3)
