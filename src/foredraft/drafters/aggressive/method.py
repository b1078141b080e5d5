"""Declaration of the method `aggressive`."""

from foredraft import zoo
from foredraft.drafters.aggressive.drafter import SOURCES, AggressiveDrafter, Config, CopySourceFinder
from foredraft.drafters.aggressive.variants import VARIANTS
from foredraft.drafters.method import DrafterContext, Method
from foredraft.errors import ForedraftError


def create(config: Config, context: DrafterContext) -> AggressiveDrafter:
    """Make the drafter. Raises ForedraftError for invalid options, or for a source that needs a missing tokenizer."""
    if config.source not in SOURCES:
        raise ForedraftError(f"unknown source {config.source!r}; use one of {', '.join(SOURCES)}")
    for name in ("branches", "tokens_per_match"):
        if getattr(config, name) < 1:
            raise ForedraftError(f"{name} must be at least 1, got {getattr(config, name)}")
    if config.start == "" or config.end == "" or (config.end is not None and config.start is None):
        raise ForedraftError("`end` says where the part after `start` ends; give both as text, or `start` alone")
    if config.start is not None and config.source not in ("auto", "prompt"):
        raise ForedraftError(f"`start` marks a part of the prompt, and the source is {config.source!r}; leave one out")
    if (config.start is not None or config.source == "fenced") and context.tokenizer is None:
        raise ForedraftError(
            "a part of the prompt is found in its text, and there is no tokenizer; use source='prompt'"
        )
    return AggressiveDrafter(
        config, context.num_speculative_tokens, CopySourceFinder(config, context.tokenizer).make_cursor
    )


def estimate_auto_rank(context: DrafterContext) -> float | None:
    """Return the rank among methods that read tokens alone: the best if the target has an encoder, else None."""
    return 30.0 if context.target is not None and context.target.has_encoder else None


METHOD = Method(
    name="aggressive",
    config=Config,
    create=create,
    uses_model=False,
    auto_rank=estimate_auto_rank,
    auto_tokens=31,  # 32 rows of a pass with the root
    default_ranks={zoo.SEQ2SEQ_TARGET: 3},
    reads_tokens_alone=True,
    variants=VARIANTS,
)
