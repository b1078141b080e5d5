"""All claims, in the order of the documentation."""

from foredraft.errors import ForedraftError, suggest
from foredraft.reproduce import (
    acceptance,
    block,
    distillation,
    draft_length,
    early_exit,
    load,
    lookahead,
    medusa_heads,
    serving,
    trees,
)
from foredraft.reproduce.claim import Claim

CLAIMS: tuple[Claim, ...] = (
    acceptance.CLAIM,
    draft_length.CLAIM,
    medusa_heads.CLAIM,
    serving.CLAIM,
    trees.CLAIM,
    distillation.CLAIM,
    early_exit.CLAIM,
    lookahead.CLAIM,
    block.CLAIM,
    load.CLAIM,
)


def find_claim(name: str) -> Claim:
    """Find a claim by its name.

    Raises:
        ForedraftError: there is none; the message lists all.
    """
    names = [claim.name for claim in CLAIMS]
    if name not in names:
        raise ForedraftError(f"unknown claim {name!r}; use one of: {', '.join(names)}{suggest(name, names)}")
    return CLAIMS[names.index(name)]
