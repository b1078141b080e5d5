"""Declaration of the method `draft_model`."""

import warnings

from foredraft.drafters.draft_model.cross_vocab.base import CrossVocabDrafter
from foredraft.drafters.draft_model.cross_vocab.select import VocabInfo, check_vocab_option, select_translation
from foredraft.drafters.draft_model.drafter import Config, DraftModel
from foredraft.drafters.draft_model.training import TrainConfig, create_trainee
from foredraft.drafters.registry import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.kernels.quantize import check_quantization
from foredraft.models.loading import load_model, load_tokenizer
from foredraft.models.wrap import wrap_model

__all__ = ["METHOD", "Config", "TrainConfig", "create", "create_trainee"]

METHOD = "draft_model"
ACCEPTS_LOADED_MODEL = True  # a model in memory may be given in place of a folder
AUTO_RANK = 60  # among the methods with a model, measured on the built-in target; higher is better


def check_architectures(context: DrafterContext, has_encoder: bool, name: str) -> None:
    """Raise ForedraftError if only one of target and draft is an encoder-decoder model."""
    if context.target is None or context.target.has_encoder == has_encoder:
        return
    draft_kind, target_kind = ("an encoder-decoder model", "a decoder alone")[:: 1 if has_encoder else -1]
    raise ForedraftError(
        f"{name} is {draft_kind} and {context.target_name} {target_kind}; use a draft of the same architecture, or a "
        "method without a model, such as ngram"
    )


def create(config: Config, context: DrafterContext) -> DraftModel | CrossVocabDrafter:
    """Load the draft model and make its drafter.

    Raises:
        ForedraftError: without a draft model, for invalid options, or if its vocabulary or architecture does not fit.
    """
    name = context.model or context.builtin_drafter
    if context.loaded_model is not None:
        name = getattr(context.loaded_model, "name_or_path", "") or type(context.loaded_model).__name__
    if name is None:
        raise ForedraftError("the method draft_model needs a draft: give --spec-model PATH (or {'model': PATH})")
    check_quantization(config.quantization)
    check_vocab_option(config.vocab)
    config.to_tree_spec(context.num_speculative_tokens)  # report invalid options before the model is loaded
    is_owned = context.loaded_model is None
    model = load_model(name, context.dtype, context.device) if is_owned else context.loaded_model
    check_architectures(context, model.config.is_encoder_decoder, name)
    lm = wrap_model(model, name, context.fused, is_owned=is_owned, quantization=config.quantization)
    # a loaded model has no tokenizer: it is assumed to have the target's, and is refused if the sizes differ
    tokenizer = load_tokenizer(name, lm.vocab_size) if is_owned else context.tokenizer
    draft = VocabInfo(name, tokenizer, lm.vocab_size)
    target = VocabInfo(context.target_name, context.tokenizer, context.vocab_size)
    make_translator = select_translation(config.vocab, target, draft, config.has_tree)
    if context.target_parameters and lm.num_parameters > context.target_parameters:
        warnings.warn(
            f"the draft {name} has more parameters ({lm.num_parameters:,}) than its target "
            f"({context.target_parameters:,}); it will slow generation down",
            stacklevel=2,
        )
    return (
        DraftModel(lm, context, config)
        if make_translator is None
        else make_translator(lm, context, config, config.draft_kv_tokens)
    )
