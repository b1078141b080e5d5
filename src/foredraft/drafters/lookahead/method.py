"""Declaration of the method `lookahead`."""

from foredraft.drafters.lookahead.drafter import Config, LookaheadDrafter
from foredraft.drafters.registry import DrafterContext
from foredraft.errors import ForedraftError

METHOD = "lookahead"
USES_MODEL = False


def create(config: Config, context: DrafterContext) -> LookaheadDrafter:
    """Make the drafter. Raises ForedraftError for options below their minimum."""
    for name, lowest in (("window", 1), ("ngram_size", 2), ("guesses", 1), ("pool", 1)):
        if getattr(config, name) < lowest:
            raise ForedraftError(f"{name} must be at least {lowest}, got {getattr(config, name)}")
    return LookaheadDrafter(config, context.num_speculative_tokens)
