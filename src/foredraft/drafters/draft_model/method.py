"""Declaration of the method `draft_model`."""

import warnings
from typing import Any

from foredraft import zoo
from foredraft.checkpoints.formats import CheckpointFormat, LayoutOrder, StoredLayout
from foredraft.drafters.counterpart import SGLANG_TREE_OPTIONS, VLLM_SAMPLED, Counterpart, set_as
from foredraft.drafters.draft_model.checkpoint import has_model_architecture, has_model_tensors
from foredraft.drafters.draft_model.compatibility import check_same_kind
from foredraft.drafters.draft_model.cross_vocab.base import CrossVocabDrafter
from foredraft.drafters.draft_model.cross_vocab.select import (
    VocabInfo,
    check_vocab_option,
    list_vocab_options,
    select_translation,
)
from foredraft.drafters.draft_model.drafter import Config, DraftModel
from foredraft.drafters.draft_model.parallel import ParallelDraftModel, find_mask_token
from foredraft.drafters.draft_model.training import TrainConfig, create_trainee
from foredraft.drafters.draft_model.variants import VARIANTS
from foredraft.drafters.method import BuiltIn, DrafterContext, HeadRecipe, Method, Training
from foredraft.errors import ForedraftError
from foredraft.kernels.quantize import check_quantization
from foredraft.models.loading import check_cpu_dtype, load_model, load_tokenizer, parse_device
from foredraft.models.wrap import wrap_model


def check_device(device: str | None, context: DrafterContext) -> None:
    """Raise ForedraftError if the draft model is to run on another device than the target."""
    if device is not None and parse_device(device) != context.device:
        raise ForedraftError(
            f"the draft model runs on the device of the target, {context.device}; leave device {device!r} out, or "
            "give both one device with --device (device= of LLM)"
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
    check_device(config.device, context)
    dtype = context.dtype if config.dtype is None else config.dtype
    model = context.loaded_model
    if is_owned:
        model = load_model(name, dtype, context.device, quantization=config.quantization, is_text_only=True)
    if not is_owned and config.dtype is not None:
        raise ForedraftError("a loaded draft model has its dtype already; leave dtype out")
    check_cpu_dtype(model)
    if context.target is not None:
        check_same_kind(model.config, name, context.target)
    lm = wrap_model(model, name, context.fused, is_owned=is_owned, quantization=config.quantization)
    lm = lm.with_context(config.max_model_len)
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
    mask_token_id = find_mask_token(model.config, name, config.parallel)
    if make_translator is None:
        return (
            DraftModel(lm, context, config)
            if mask_token_id is None
            else ParallelDraftModel(lm, context, mask_token_id, config)
        )
    if config.parallel:
        raise ForedraftError(
            f"{name} has another vocabulary than {context.target_name}, and translated drafts are made token by "
            "token; leave parallel out"
        )
    return make_translator(lm, context, config, config.draft_kv_tokens)


def translate_vocab(vocab: str) -> dict[str, Any]:
    """Return vLLM's settings for a draft model with another vocabulary. Raises ForedraftError if there are none."""
    if vocab not in ("auto", "tli"):
        raise ForedraftError(f"vLLM drafts in another vocabulary by shared tokens alone, not by {vocab}; give tli")
    # Without this vLLM refuses: it has no q in the target's vocabulary.
    return {"use_heterogeneous_vocab": True, "draft_sample_method": "greedy"} if vocab == "tli" else {}


FORMAT = CheckpointFormat(
    title="a whole language model",
    layouts=(
        StoredLayout("causal LM", LayoutOrder.WHOLE_MODEL, has_model_tensors),
        StoredLayout("causal LM", LayoutOrder.ARCHITECTURE, has_model_architecture),
    ),
    no_exports=": vLLM and SGLang load the folder as it is",
)
METHOD = Method(
    name="draft_model",
    config=Config,
    create=create,
    accepts_loaded_model=True,
    auto_rank=60,  # above the methods with a model that are slower on the built-in target
    option_choices={"vocab": list_vocab_options},
    option_aliases={
        "use_heterogeneous_vocab": lambda value: {"vocab": "tli"} if value else {},
        "parallel_drafting": lambda value: {"parallel": value},
    },
    checkpoint=FORMAT,
    training=Training(TrainConfig, create_trainee),
    default_ranks={zoo.DEFAULT_TARGET: 2, zoo.SEQ2SEQ_TARGET: 2},
    built_in=BuiltIn(
        {zoo.DEFAULT_TARGET: "draft", zoo.SEQ2SEQ_TARGET: "seq2seq_draft"},
        {
            zoo.DEFAULT_TARGET: HeadRecipe(  # 1.2 M parameters
                700, {"layers": "1", "hidden": "192"}, folder="draft_2", boost=("draft",), further_steps=400
            )
        },
        further={zoo.DEFAULT_TARGET: ("draft_2",)},
    ),
    counterparts={
        "vllm": Counterpart(
            "draft_model",
            options={
                "vocab": translate_vocab,
                "revision": set_as("revision"),
                "max_model_len": set_as("max_model_len"),
                "parallel": set_as("parallel_drafting"),
            },
            settings=VLLM_SAMPLED,
        ),
        "sglang": Counterpart("STANDALONE", options=SGLANG_TREE_OPTIONS),
        "trtllm": Counterpart("Draft_Target"),
        "llama.cpp": Counterpart("draft-simple", settings={"--spec-draft-sampling": "probabilistic"}),
    },
    variants=VARIANTS,
)
