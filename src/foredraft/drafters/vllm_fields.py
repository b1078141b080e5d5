"""Fields of vLLM's `SpeculativeConfig` that Foredraft does not have, with what to use instead.

docs/reference/speculative-config.md lists all fields. A field that a method has under another name is declared by the
method (`Method.option_aliases`).

Reference: vLLM, `vllm/config/speculative.py`, releases 0.5 to 0.30.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.errors import ForedraftError


@dataclass(frozen=True)
class MissingField:
    """Field that no method has, or not the method in use.

    Attributes:
        advice: what to use instead.
        neutral: values that ask for what Foredraft does anyway. They are accepted. None is always one of them.
    """

    advice: str
    neutral: tuple[Any, ...] = ()


_ONE_DEVICE = "the drafter runs on the device of the target, and both on one device; leave it out"
_SUFFIX = "it is an option of the method suffix"
_SCHEDULING = "it changes vLLM's scheduling alone; leave it out"
_KERNELS = "the device decides the kernels; leave it out"
_RULE = "it is a setting of the rule typical; give verify=make_typical_rule(...) to LLM, or --verify typical beside it"
_SYNTHETIC = "it simulates acceptance, which changes the output; --spec-simulate RATE does so for load tests"
MISSING_FIELDS: Mapping[str, MissingField] = {
    "draft_tensor_parallel_size": MissingField(_ONE_DEVICE, (1,)),
    "tensor_parallel_size": MissingField(_ONE_DEVICE, (1,)),
    "device": MissingField(_ONE_DEVICE),
    "dtype": MissingField("a head has the dtype of the target; set it with --dtype (dtype= of LLM)"),
    "quantization": MissingField("this method rounds no weights; --quantization rounds those of the target"),
    "max_model_len": MissingField("the method has no context of its own; --max-model-len limits the target"),
    "use_heterogeneous_vocab": MissingField("only the method draft_model takes another vocabulary", (False,)),
    "code_revision": MissingField("code that comes with a model is never run; leave it out"),
    "draft_load_config": MissingField("weights are read from safetensors; leave it out"),
    "kv_cache_dtype": MissingField("a drafter's KV cache has its own dtype; leave it out", ("auto",)),
    "moe_backend": MissingField(_KERNELS, ("auto",)),
    "attention_backend": MissingField(_KERNELS, ("auto",)),
    "enforce_eager": MissingField("there are no CUDA graphs to turn off; leave it out", (True, False)),
    "disable_padded_drafter_batch": MissingField(_SCHEDULING, (False,)),
    "disable_eagle_block_drop": MissingField(_SCHEDULING, (False,)),
    "disable_mqa_scorer": MissingField(_SCHEDULING, (False,)),
    "disable_logprobs": MissingField("log-probabilities are always those of the target; leave it out", (False,)),
    "use_local_argmax_reduction": MissingField(_ONE_DEVICE, (False,)),
    "parallel_drafting": MissingField(
        "it is an option of draft_model and eagle3; medusa, blockwise and dflash draft in one pass", (False,)
    ),
    "enable_adaptive_verification": MissingField(
        "num_speculative_tokens 'auto' adapts the draft to the measured acceptance", (False,)
    ),
    "draft_sample_method": MissingField(
        "drafts are sampled from q if the rule uses q; verify 'match' drafts without q", ("probabilistic",)
    ),
    "dspark_draft_topk": MissingField("the method dspark does not exist here; use eagle3 or draft_model"),
    "synthetic_acceptance_rates": MissingField(_SYNTHETIC),
    "synthetic_acceptance_length": MissingField(_SYNTHETIC),
    "posterior_threshold": MissingField(_RULE),
    "posterior_alpha": MissingField(_RULE),
    "verify": MissingField("it is no setting of the drafter; give verify= to LLM, or --verify"),
    "prompt_lookup_min": MissingField("it is an option of the method ngram"),
    "prompt_lookup_max": MissingField("it is an option of the method ngram"),
    "suffix_decoding_max_spec_factor": MissingField(_SUFFIX),
    "suffix_decoding_min_token_prob": MissingField(_SUFFIX),
    "suffix_decoding_max_cached_requests": MissingField(_SUFFIX),
    "suffix_decoding_max_tree_depth": MissingField(
        "matches have no depth limit; num_speculative_tokens limits the draft, and store_tokens the memory"
    ),
}


def check_missing_field(name: str, value: Any) -> bool:
    """Return True if a field that the method does not have may be left out, False for a name that vLLM has not either.

    Raises:
        ForedraftError: for a field of vLLM with a value that cannot be honoured.
    """
    field = MISSING_FIELDS.get(name)
    if field is None:
        return False
    if value is None or value in field.neutral:
        return True
    raise ForedraftError(f"there is no {name} here: {field.advice}")
