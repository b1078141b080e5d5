"""Turn transformers' generation config, logits processors and stopping criteria into `Sampling`."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from foredraft.errors import ForedraftError
from foredraft.sampling.params import LogitsProcessor, Sampling

# These processors read the encoder's or the prompt's ids of the whole batch, or keep state from token to token.
_UNSUPPORTED_PROCESSORS = (
    processors.EncoderRepetitionPenaltyLogitsProcessor,
    processors.EncoderNoRepeatNGramLogitsProcessor,
    processors.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    processors.SynthIDTextWatermarkLogitsProcessor,
)
_ALTERNATIVE = "drop it or use plain generate()"


@dataclass(frozen=True)
class GenerationPlan:
    """One Sampling per row, and when the whole call ends."""

    samplings: tuple[Sampling, ...]
    pad_id: int
    deadline: float | None = None  # seconds of time.time()
    processor_snapshots: tuple[tuple[Any, dict[str, Any]], ...] = field(
        default=()
    )  # processors and copies of their attributes

    def check_processors(self) -> None:
        """Raise ForedraftError if an attribute of a custom processor has changed: it keeps state between calls."""
        for processor, before in self.processor_snapshots:
            if not _is_same(vars(processor), before):
                raise ForedraftError(
                    f"the logits processor {type(processor).__name__} keeps state between calls, which drafted "
                    f"tokens would spoil; make it a function of its ids and scores, or use plain generate()"
                )


def make_plan(
    config: Any,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    tokenizer: Any,
    prompt_length: int,
    num_rows: int,
    stop_strings: tuple[str, ...],
) -> GenerationPlan:
    """Convert the arguments that determine the output. Raises ForedraftError for one without a counterpart."""
    sampling = Sampling(temperature=1.0 if config.do_sample else 0.0, max_tokens=1 << 30, ignore_eos=True)
    deadline = None
    for criterion in stopping_criteria:
        if isinstance(criterion, criteria.MaxTimeCriteria):
            deadline = criterion.initial_timestamp + criterion.max_time
        else:
            sampling = _apply_criterion(sampling, criterion, prompt_length, tokenizer)
    if stop_strings:
        sampling = replace(sampling, stop=(*sampling.stop, *stop_strings))
    watched = []
    for processor in logits_processor:
        changed = _convert_processor(sampling, processor, prompt_length)
        if changed is None:
            sampling = _append_processor(sampling, processor, num_rows)
            if not type(processor).__module__.startswith("transformers."):  # those of transformers may fill caches
                watched.append((processor, _copy_attributes(processor)))
        else:
            sampling = changed
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    rows = tuple(_bind_row(sampling, row) for row in range(num_rows))
    return GenerationPlan(rows, int(pad), deadline, tuple(w for w in watched if w[1] is not None))  # type: ignore[misc]


def _apply_criterion(sampling: Sampling, criterion: Any, prompt_length: int, tokenizer: Any) -> Sampling:
    match criterion:
        case criteria.MaxLengthCriteria():
            return replace(sampling, max_tokens=criterion.max_length - prompt_length)
        case criteria.EosTokenCriteria():
            return replace(sampling, stop_token_ids=tuple(int(i) for i in criterion.eos_token_id.flatten()))
        case criteria.StopStringCriteria():
            if tokenizer is None:
                raise ForedraftError(
                    "stop_strings need the tokenizer: use foredraft.speculate(..., tokenizer=tokenizer)"
                )
            return replace(sampling, stop=tuple(criterion.stop_strings))
    name = type(criterion).__name__
    raise ForedraftError(f"the stopping criterion {name} is not supported with foredraft.speculate; {_ALTERNATIVE}")


def _convert_processor(sampling: Sampling, processor: Any, prompt_length: int) -> Sampling | None:
    """Return the parameters with the counterpart of a processor of transformers; None if there is none."""
    match processor:
        case processors.TemperatureLogitsWarper():
            return replace(sampling, temperature=float(processor.temperature))
        case processors.TopKLogitsWarper():
            return replace(sampling, top_k=int(processor.top_k))
        case processors.TopPLogitsWarper():
            return replace(sampling, top_p=float(processor.top_p))
        case processors.MinPLogitsWarper():
            return replace(sampling, min_p=float(processor.min_p))
        case processors.TypicalLogitsWarper():
            return replace(sampling, typical_p=float(processor.mass))
        # prompt_ignore_length is a tensor if generate() set it to the lengths of the padding, which is removed before.
        case processors.RepetitionPenaltyLogitsProcessor() if not isinstance(processor.prompt_ignore_length, int):
            return replace(sampling, repetition_penalty=float(processor.penalty))
        case processors.MinNewTokensLengthLogitsProcessor():
            return replace(sampling, min_tokens=max(sampling.min_tokens, int(processor.min_new_tokens)))
        case processors.MinLengthLogitsProcessor():
            return replace(sampling, min_tokens=max(sampling.min_tokens, int(processor.min_length) - prompt_length))
        case processors.NoBadWordsLogitsProcessor():
            return replace(sampling, bad_words=tuple(processor.sequence_bias))
        case processors.SequenceBiasLogitsProcessor() if all(len(ids) == 1 for ids in processor.sequence_bias):
            return replace(sampling, logit_bias={ids[0]: bias for ids, bias in processor.sequence_bias.items()})
        case processors.LogitNormalization():
            return sampling  # every distribution is normalised here
    return None


def _append_processor(sampling: Sampling, processor: Any, num_rows: int) -> Sampling:
    """Apply the processor itself at every position. Raises ForedraftError if it is no function of ids and scores."""
    name = type(processor).__name__
    is_late = (
        sampling.temperature not in (0, 1)
        or sampling.top_k
        or sampling.top_p < 1
        or sampling.min_p
        or sampling.typical_p < 1
    )
    if isinstance(processor, _UNSUPPORTED_PROCESSORS):
        raise ForedraftError(f"the logits processor {name} is not supported with foredraft.speculate; {_ALTERNATIVE}")
    if isinstance(processor, processors.PrefixConstrainedLogitsProcessor) and processor._num_beams > 1:
        raise ForedraftError(f"the logits processor {name} is not supported with beams; use num_beams=1")
    if is_late:  # Sampling applies logits_processors before the temperature and the filters
        raise ForedraftError(
            f"{name} comes after the temperature or a filter, which foredraft.speculate cannot reorder; {_ALTERNATIVE}"
        )
    return replace(sampling, logits_processors=(*sampling.logits_processors, processor))


def _bind_row(sampling: Sampling, row: int) -> Sampling:
    """prefix_allowed_tokens_fn is given the number of its row; all other processors are the same for every row."""
    return replace(sampling, logits_processors=tuple(_bind_processor(p, row) for p in sampling.logits_processors))


def _bind_processor(processor: Any, row: int) -> LogitsProcessor:
    if not isinstance(processor, processors.PrefixConstrainedLogitsProcessor) or row == 0:
        return processor  # type: ignore[no-any-return]
    allowed = processor._prefix_allowed_tokens_fn
    return processors.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)  # type: ignore[no-any-return]


def _copy_attributes(processor: Any) -> dict[str, Any] | None:
    """Attributes as they are now; None for a plain function, or for what cannot be copied."""
    try:
        attributes: dict[str, Any] = copy.deepcopy(vars(processor))
    except Exception:  # an attribute may refuse to be copied in any way
        return None
    return attributes


def _is_same(now: Any, before: Any) -> bool:
    """Equality of attributes; objects of unknown classes count as equal."""
    if isinstance(before, torch.Tensor):
        return isinstance(now, torch.Tensor) and now.shape == before.shape and bool(torch.equal(now, before))
    if isinstance(before, dict):
        return isinstance(now, dict) and now.keys() == before.keys() and all(_is_same(now[k], before[k]) for k in now)
    if isinstance(before, list | tuple):
        return type(now) is type(before) and len(now) == len(before) and all(map(_is_same, now, before))
    if isinstance(before, set | frozenset | str | int | float | bool | None):
        return bool(now == before)
    return type(now) is type(before)
