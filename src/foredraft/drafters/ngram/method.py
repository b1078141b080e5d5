"""Declaration of the method `ngram`."""

from foredraft import zoo
from foredraft.drafters.method import DrafterContext, Method
from foredraft.drafters.ngram.drafter import Config, NgramDrafter
from foredraft.drafters.ngram.variants import VARIANTS
from foredraft.errors import ForedraftError


def create(config: Config, context: DrafterContext) -> NgramDrafter:
    """Make the drafter. Raises ForedraftError for invalid options."""
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if not 1 <= low <= high:
        raise ForedraftError(f"prompt_lookup_min ({low}) must lie in 1..prompt_lookup_max ({high})")
    for name in ("branches", "tokens_per_match"):
        if getattr(config, name) < 1:
            raise ForedraftError(f"{name} must be at least 1, got {getattr(config, name)}")
    return NgramDrafter(config, context.num_speculative_tokens)


METHOD = Method(
    name="ngram",
    config=Config,
    create=create,
    uses_model=False,
    auto_rank=10,
    default_ranks={None: 1, zoo.SEQ2SEQ_TARGET: 1},
    variants=VARIANTS,
)
