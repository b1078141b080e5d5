"""Newest releases of torch and transformers with which Foredraft was tested, and a warning about newer ones."""

import warnings
from importlib import metadata

NEWEST_TESTED = {"torch": (2, 13), "transformers": (5, 24)}  # (major, minor)


def describe_untested(versions: dict[str, str]) -> list[str]:
    """Describe every package that is newer than the newest tested release.

    Args:
        versions: installed versions by package.

    Returns:
        One sentence per package.
    """
    sentences = []
    for name, newest in NEWEST_TESTED.items():
        major, minor = (int(part) for part in versions[name].split("+")[0].split(".")[:2])
        if (major, minor) > newest:
            tested = ".".join(map(str, newest))
            sentences.append(
                f"{name} {versions[name]} is newer than {tested}, the last release tested; "
                f"if a model fails to load, pip install '{name}=={tested}.*'"
            )
    return sentences


def read_installed_versions() -> dict[str, str]:
    """Read the installed versions of the packages in NEWEST_TESTED."""
    return {name: metadata.version(name) for name in NEWEST_TESTED}


def warn_if_untested() -> None:
    """Warn about installed packages that are newer than the newest tested release."""
    for sentence in describe_untested(read_installed_versions()):
        warnings.warn(sentence, stacklevel=3)
