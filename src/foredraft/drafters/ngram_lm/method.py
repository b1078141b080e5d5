"""Declaration of the method `ngram_lm`."""

from foredraft import zoo
from foredraft.checkpoints.formats import CheckpointFormat, LayoutOrder, StoredLayout
from foredraft.drafters.method import BuiltIn, DrafterContext, Method, Training
from foredraft.drafters.ngram_lm.drafter import Config, NgramLMDrafter
from foredraft.drafters.ngram_lm.table import NgramModel, is_table
from foredraft.drafters.ngram_lm.training import TrainConfig, learn
from foredraft.drafters.ngram_lm.variants import VARIANTS
from foredraft.errors import ForedraftError


def create(config: Config, context: DrafterContext) -> NgramLMDrafter:
    """Load the table, if there is one. Raises ForedraftError if its vocabulary is not the target's."""
    if not 0 <= config.min_confidence <= 1:
        raise ForedraftError(f"min_confidence must lie in 0..1, got {config.min_confidence}")
    if not 0 < config.discount < 1:
        raise ForedraftError(f"discount must lie between 0 and 1, got {config.discount}")
    if config.order < 1:
        raise ForedraftError(f"order must be at least 1, got {config.order}")
    if not config.base_weight > 0:
        raise ForedraftError(f"base_weight must be positive, got {config.base_weight}")
    folder = context.model or context.builtin_drafter
    model = NgramModel.load(folder, context.vocab_size) if folder else NgramModel.make_uniform(context.vocab_size)
    return NgramLMDrafter(model, config, context)


FORMAT = CheckpointFormat(
    title="an n-gram table", layouts=(StoredLayout("n-gram table", LayoutOrder.DECLARED, is_table),)
)
METHOD = Method(
    name="ngram_lm",
    config=Config,
    create=create,
    checkpoint=FORMAT,
    training=Training(TrainConfig, learn=learn),
    built_in=BuiltIn({zoo.DEFAULT_TARGET: "ngram"}),
    reads_tokens_alone=True,
    variants=VARIANTS,
)
