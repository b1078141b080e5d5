"""Declaration of the method `token_recycling`."""

from foredraft.drafters.method import DrafterContext, Method
from foredraft.drafters.token_recycling.drafter import Config, TokenRecyclingDrafter
from foredraft.drafters.token_recycling.variants import VARIANTS
from foredraft.errors import ForedraftError


def create(config: Config, context: DrafterContext) -> TokenRecyclingDrafter:
    """Make the drafter. Raises ForedraftError for options below their minimum."""
    for name in ("top_k", "nodes"):
        if getattr(config, name) < 1:
            raise ForedraftError(f"{name} must be at least 1, got {getattr(config, name)}")
    return TokenRecyclingDrafter(config, context.num_speculative_tokens, context.vocab_size)


METHOD = Method(name="token_recycling", config=Config, create=create, uses_model=False, variants=VARIANTS)
