"""Declaration of the method `lookahead`."""

from foredraft.drafters.lookahead.drafter import Config, LookaheadDrafter
from foredraft.drafters.lookahead.variants import VARIANTS
from foredraft.drafters.method import DrafterContext, Method
from foredraft.errors import ForedraftError


def create(config: Config, context: DrafterContext) -> LookaheadDrafter:
    """Make the drafter. Raises ForedraftError for options below their minimum."""
    for name, lowest in (("window", 1), ("ngram_size", 2), ("guesses", 1), ("pool", 1)):
        if getattr(config, name) < lowest:
            raise ForedraftError(f"{name} must be at least {lowest}, got {getattr(config, name)}")
    return LookaheadDrafter(config, context.num_speculative_tokens)


METHOD = Method(name="lookahead", config=Config, create=create, uses_model=False, variants=VARIANTS)
