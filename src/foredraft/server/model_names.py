"""Names of models on a server with several."""

import re
from collections.abc import Sequence

from foredraft.errors import ForedraftError

MAX_NAME_CHARS = 128
# Parts between slashes begin with a letter or digit, so that a name in a path of a URL stays as it is.
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


def check_model_name(name: str) -> str:
    """Return a name. Raises ForedraftError for one with characters that a path of a URL or a metric should not have."""
    if len(name) > MAX_NAME_CHARS:
        raise ForedraftError(f"a model's name may have at most {MAX_NAME_CHARS} characters")
    if not _NAME_PATTERN.fullmatch(name):
        raise ForedraftError(
            f"{name!r} is no name of a model: use A-Z, a-z, 0-9, '.', '_', '-' and '/', with a letter or digit first "
            "and after every '/'"
        )
    return name


def find_base_name(name: str, bases: Sequence[str]) -> str:
    """Return the name of the model to which an adapter belongs.

    Args:
        name: name of the adapter. It begins with that of its base and a slash, unless there is one base only.
        bases: names of the models that may be it.

    Raises:
        ForedraftError: the name does not say which model it is.
    """
    matching = [base for base in bases if name.startswith(f"{base}/")]
    if matching:
        return max(matching, key=len)
    if len(bases) == 1:
        return bases[0]
    raise ForedraftError(
        f"the adapter {name!r} does not say which model it adapts; name it BASE/{name}, with BASE one of: "
        f"{', '.join(bases)}"
    )
