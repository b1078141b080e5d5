"""Value of `--spec-tokens`."""

from foredraft.cli.shell import UsageError
from foredraft.errors import ForedraftError


def parse_draft_length(text: str) -> int | str | None:
    """Parse --spec-tokens.

    Args:
        text: value of the option.

    Returns:
        A length in tokens, or a range or table as text; None = chosen from measured times.

    Raises:
        UsageError: for another value.
    """
    from foredraft.draft_length.length_table import AUTO_LENGTHS, LengthTable

    try:
        lengths = LengthTable.parse(text, "--spec-tokens")
    except ForedraftError as error:
        raise UsageError(str(error)) from None
    if lengths == AUTO_LENGTHS:
        return None
    return lengths.most if lengths.is_uniform and lengths.is_fixed else str(lengths)
