"""For users of transformers: `model.generate(..., custom_generate=foredraft.speculate(drafter=...))`.

generate() prepares inputs, processors and stopping criteria as ever; the decoding loop is ours. What we cannot honour
is refused by name; nothing is ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from foredraft.errors import ForedraftError
from foredraft.llm import LLM, DrafterSpec
from foredraft.models import attention
from foredraft.models.prompts import Prompt
from foredraft.sampling import Sampling
from foredraft.source import Begun, Source

# prepared by generate() for its own loop; ours derives them from the tokens
_DERIVED = frozenset({"use_cache", "cache_position", "position_ids", "past_key_values", "logits_to_keep"})
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def speculate(
    drafter: DrafterSpec = "ngram",
    *,
    num_speculative_tokens: int | None = None,
    verify: str = "auto",
    tokenizer: Any = None,
    streamer: Any = None,
    fused: bool = False,
) -> Callable[..., Any]:
    """A decoding loop for generate(). The arguments are LLM's; a tokenizer is needed for stop_strings and for drafts
    whose vocabulary is to be compared. Batches (left-padded), sampling and num_return_sequences work.

    A streamer must be given here: transformers 5 does not hand the one of generate() on to a custom loop. fused=True
    runs a recognised model natively on CPU, from a copy of its weights made at the first call.

    Raises ForedraftError for beams, processors or criteria that have no counterpart here.
    """
    engines: WeakKeyDictionary[Any, LLM] = WeakKeyDictionary()

    def decode(
        model: Any,
        input_ids: Tensor,  # [B, L]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        # a parameter of this name would reach us twice
        attention_mask: Tensor | None = model_kwargs.pop(
            "attention_mask", None
        )  # [B, L], of the encoder if there is one
        encoded = model_kwargs.pop("encoder_outputs", None)
        _refuse(generation_config, model_kwargs, streamer, len(input_ids))
        plan = _plan(generation_config, logits_processor, stopping_criteria, tokenizer, input_ids.shape[1])
        before = model.config._attn_implementation
        try:
            if model not in engines:
                engines[model] = LLM(
                    model,
                    drafter,
                    verify=verify,
                    num_speculative_tokens=num_speculative_tokens,
                    tokenizer=tokenizer,
                    fused=fused,
                )
            llm = engines[model]
            if encoded is None:
                model.set_attn_implementation(attention.NAME)
                rows = _run(llm, input_ids, _prompts(input_ids, attention_mask), plan, streamer)
            else:
                rows = _run(llm, input_ids, _begun(input_ids, encoded[0], attention_mask), plan, streamer)
        finally:
            model.set_attn_implementation(before)
        sequences = _padded(input_ids, rows, plan.pad_id)
        if not generation_config.return_dict_in_generate:
            return sequences
        kind = GenerateDecoderOnlyOutput if encoded is None else GenerateEncoderDecoderOutput
        return kind(sequences=sequences)

    return decode


@dataclass(frozen=True)
class Plan:
    sampling: Sampling
    pad_id: int


def _refuse(config: Any, model_kwargs: dict[str, Any], streamer: Any, num_rows: int) -> None:
    for name in _OUTPUTS:
        if getattr(config, name, False):
            raise ForedraftError(f"{name} is not available with foredraft.speculate; drop it or use plain generate()")
    if (config.num_beams or 1) > 1:
        raise ForedraftError("beam search cannot be speculated losslessly; use num_beams=1")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ForedraftError("a filled past_key_values cannot be continued; pass the whole text as input_ids")
    unknown = sorted(k for k, v in model_kwargs.items() if k not in _DERIVED and v is not None)
    if unknown:
        raise ForedraftError(f"the model input {unknown[0]!r} is not supported with foredraft.speculate")
    if streamer is not None and num_rows > 1:
        raise ForedraftError("a streamer takes one sequence; use it with a batch of one")


def _plan(config: Any, logits_processor: Any, stopping_criteria: Any, tokenizer: Any, prompt_length: int) -> Plan:
    sampling = Sampling(temperature=1.0 if config.do_sample else 0.0, max_tokens=1 << 30, ignore_eos=True)
    for criterion in stopping_criteria:
        sampling = _with_criterion(sampling, criterion, prompt_length, tokenizer)
    for processor in logits_processor:
        sampling = _with_processor(sampling, processor, prompt_length)
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    return Plan(sampling, int(pad))


def _with_criterion(s: Sampling, criterion: Any, prompt_length: int, tokenizer: Any) -> Sampling:
    match criterion:
        case criteria.MaxLengthCriteria():
            return replace(s, max_tokens=criterion.max_length - prompt_length)
        case criteria.EosTokenCriteria():
            return replace(s, stop_token_ids=tuple(int(i) for i in criterion.eos_token_id.flatten()))
        case criteria.StopStringCriteria():
            if tokenizer is None:
                raise ForedraftError(
                    "stop_strings need the tokenizer: use foredraft.speculate(..., tokenizer=tokenizer)"
                )
            return replace(s, stop=tuple(criterion.stop_strings))
    raise ForedraftError(f"the stopping criterion {type(criterion).__name__} is not supported with foredraft.speculate")


def _with_processor(s: Sampling, processor: Any, prompt_length: int) -> Sampling:
    match processor:
        case processors.TemperatureLogitsWarper():
            return replace(s, temperature=float(processor.temperature))
        case processors.TopKLogitsWarper():
            return replace(s, top_k=int(processor.top_k))
        case processors.TopPLogitsWarper():
            return replace(s, top_p=float(processor.top_p))
        case processors.MinPLogitsWarper():
            return replace(s, min_p=float(processor.min_p))
        case processors.TypicalLogitsWarper():
            return replace(s, typical_p=float(processor.mass))
        # generate() itself gives the padding's lengths as a tensor: padding never reaches us
        case processors.RepetitionPenaltyLogitsProcessor() if not isinstance(processor.prompt_ignore_length, int):
            return replace(s, repetition_penalty=float(processor.penalty))
        case processors.MinNewTokensLengthLogitsProcessor():
            return replace(s, min_tokens=max(s.min_tokens, int(processor.min_new_tokens)))
        case processors.MinLengthLogitsProcessor():
            return replace(s, min_tokens=max(s.min_tokens, int(processor.min_length) - prompt_length))
        case processors.NoBadWordsLogitsProcessor():
            return replace(s, bad_words=tuple(processor.sequence_bias))
        case processors.SequenceBiasLogitsProcessor() if all(len(ids) == 1 for ids in processor.sequence_bias):
            return replace(s, logit_bias={ids[0]: bias for ids, bias in processor.sequence_bias.items()})
        case processors.LogitNormalization():
            return s  # every law is normalised here
    raise ForedraftError(f"the logits processor {type(processor).__name__} is not supported with foredraft.speculate")


def _prompts(input_ids: Tensor, mask: Tensor | None) -> list[Prompt]:
    return [row[keep.bool()].tolist() for row, keep in zip(input_ids, _mask(input_ids, mask), strict=True)]


def _begun(input_ids: Tensor, states: Tensor, mask: Tensor | None) -> list[Prompt]:
    """What generate()'s own pass of the encoder made of every row [B, S, H], and the decoder's first tokens."""
    kept = _mask(states[..., 0], mask).bool() if mask is None or mask.shape == states.shape[:2] else None
    rows = states if kept is None else [row[keep] for row, keep in zip(states, kept, strict=True)]
    return [Begun(Source(states=row), ids.tolist()) for row, ids in zip(rows, input_ids, strict=True)]


def _run(llm: LLM, input_ids: Tensor, prompts: list[Prompt], plan: Plan, streamer: Any) -> list[list[int]]:
    # torch.manual_seed governs generate(); it governs this loop through the seeds drawn here
    seeds = torch.randint(1 << 62, (len(prompts),)).tolist()
    greedy = plan.sampling.is_greedy
    params = [plan.sampling if greedy else replace(plan.sampling, seed=seed) for seed in seeds]
    outputs: list[list[int]] = [[] for _ in prompts]
    if streamer is not None:
        streamer.put(input_ids.cpu())
    for delta in llm.stream(prompts, params):
        outputs[delta.index] += delta.token_ids
        if streamer is not None:
            for token in delta.token_ids:
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    return outputs


def _mask(input_ids: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones_like(input_ids) if mask is None else mask


def _padded(input_ids: Tensor, outputs: list[list[int]], pad_id: int) -> Tensor:
    """[B, L + longest output]"""
    longest = max(map(len, outputs))
    tail = [row + [pad_id] * (longest - len(row)) for row in outputs]
    return torch.cat([input_ids, torch.tensor(tail, dtype=input_ids.dtype, device=input_ids.device)], 1)
