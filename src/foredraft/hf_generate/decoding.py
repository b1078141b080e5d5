"""Decode for transformers: `model.generate(..., custom_generate=foredraft.speculate(drafter=...))`.

`generate` prepares inputs, logits processors and stopping criteria as usual; the decoding loop is replaced. Every
argument is honoured or refused by name.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from foredraft.drafter_factory import find_default_method
from foredraft.drafters.checkpoint_folders import recognise_loaded
from foredraft.errors import ForedraftError
from foredraft.hf_generate.caller import read_caller
from foredraft.hf_generate.plan import GenerationPlan, make_plan
from foredraft.hf_generate.scores import ScoredOutputs, score_sequences
from foredraft.llm import DEFAULT_DRAFTER, LLM, UserDrafterSpec
from foredraft.models import attention
from foredraft.models.prompts import Prompt
from foredraft.source import EncoderSource, PreparedPrompt
from foredraft.verification.rule import Rule

# Inputs that generate() prepares for its own loop; this loop derives them from the tokens.
_CACHE_INPUTS = ("cache", "past_key_values")  # the latter before transformers 5.24
_DERIVED_INPUTS = frozenset({"use_cache", "cache_position", "position_ids", "logits_to_keep", *_CACHE_INPUTS})
_UNSUPPORTED_OUTPUTS = ("output_attentions", "output_hidden_states")
_LOCKS: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()  # model -> lock of its calls
_MAKING = threading.Lock()  # held while a lock is created


@dataclass(frozen=True)
class SpeculateSettings:
    """Arguments of `speculate`, common to all calls of one loop."""

    drafter: UserDrafterSpec
    num_speculative_tokens: int | str | None
    verify: str | Rule
    fused: bool
    tokenizer: Any


@dataclass(frozen=True)
class CallOptions:
    """Arguments that `generate` does not pass to a custom loop."""

    streamer: Any = None
    has_prompt: bool = False  # `generate` has already given the prompt to the streamer
    stop_strings: tuple[str, ...] = ()


class Speculation:
    """A decoding loop for `generate(custom_generate=...)`; make one with `foredraft.speculate`."""

    def __init__(self, settings: SpeculateSettings, options: CallOptions) -> None:
        self.settings = settings
        self.options = options
        self._llms: WeakKeyDictionary[Any, dict[int | None, LLM]] = WeakKeyDictionary()
        # Attention names with which the engines run a model.
        self._implementations: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,  # [B, L]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Decode as `generate` asks a custom loop to. Raises ForedraftError for what cannot be honoured."""
        caller = read_caller(self)
        options, assistant = self.options, None
        if caller is not None:
            assistant = caller.assistant_model
            if caller.streamer is not None:
                if options.streamer is not None:
                    raise ForedraftError("a streamer was given to generate() and to foredraft.speculate; give one")
                options = replace(options, streamer=caller.streamer, has_prompt=True)
        inputs = LoopInputs(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        return self._decode(inputs, options, assistant)

    def generate(
        self,
        model: Any,
        inputs: Tensor | None = None,
        *,
        streamer: Any = None,
        assistant_model: Any = None,
        stop_strings: str | list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call `model.generate(inputs, **kwargs)` with this loop; what the call returns is transformers' own.

        Use it for `stop_strings`: transformers drops their tokenizer before a custom loop starts. Raises
        ForedraftError for what cannot be honoured.
        """
        _check_arguments(model, inputs)
        if stop_strings is not None and self.settings.tokenizer is None:
            raise ForedraftError("stop_strings need a tokenizer: give tokenizer=... beside them")
        stops = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings or ())
        options = replace(self.options, stop_strings=stops)
        options = options if streamer is None else replace(options, streamer=streamer)

        def decode(
            model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:  # fmt: skip
            loop = LoopInputs(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
            return self._decode(loop, options, assistant_model)

        with _in_turn(model, assistant_model):
            return model.generate(inputs, custom_generate=decode, **kwargs)

    def _decode(self, inputs: "LoopInputs", options: CallOptions, assistant: Any) -> Any:
        with _in_turn(inputs.model, assistant):
            return self._decode_alone(inputs, options, assistant)

    def _decode_alone(self, inputs: "LoopInputs", options: CallOptions, assistant: Any) -> Any:
        # Removed from model_kwargs: `_check_supported` refuses all inputs there that this loop does not derive itself.
        mask: Tensor | None = inputs.model_kwargs.pop("attention_mask", None)  # [B, L], of the encoder if there is one
        encoded = inputs.model_kwargs.pop("encoder_outputs", None)
        config, model, ids = inputs.config, inputs.model, inputs.input_ids
        _check_supported(config, inputs.model_kwargs, options.streamer, len(ids))
        make = partial(make_plan, config, inputs.processors, inputs.criteria, self.settings.tokenizer)
        plan = make(ids.shape[1], len(ids), options.stop_strings)
        prompts = _unpad_prompts(ids, mask) if encoded is None else _build_encoder_prompts(ids, encoded[0], mask)
        with _restore_attention(model, assistant):
            llm = self._get_llm(model, assistant)
            for used in (model, assistant):
                if used is not None:
                    used.set_attn_implementation(self._implementations[used])
            rows = _generate_rows(llm, ids, prompts, plan, options)
        sequences = _pad_outputs(ids, rows, plan.pad_id)
        if not config.return_dict_in_generate:
            return sequences
        scored = ScoredOutputs()
        if config.output_scores or config.output_logits:
            scored = score_sequences(model, sequences, ids.shape[1], inputs.processors, config, mask, encoded)
        kind = GenerateDecoderOnlyOutput if encoded is None else GenerateEncoderDecoderOutput
        return kind(sequences=sequences, scores=scored.scores, logits=scored.logits)

    def _get_llm(self, model: Any, assistant: Any) -> LLM:
        """Return the LLM around a model, created at its first call."""
        engines = self._llms.setdefault(model, {})
        key = None if assistant is None else id(assistant)
        if key not in engines:
            settings = self.settings
            drafter = settings.drafter
            if assistant is not None:
                if drafter != DEFAULT_DRAFTER:
                    raise ForedraftError("an assistant_model and a drafter were given; leave one out")
                drafter = {"method": recognise_loaded(assistant) or "draft_model", "model": assistant}
            elif drafter == DEFAULT_DRAFTER:
                drafter = find_default_method(None)
            engines[key] = LLM(
                model,
                drafter,
                verify=settings.verify,
                num_speculative_tokens=settings.num_speculative_tokens,
                tokenizer=settings.tokenizer,
                fused=settings.fused,
            )
            for used in (model, assistant):
                if used is not None:
                    self._implementations[used] = attention.read_implementations(used)
        return engines[key]


@dataclass(frozen=True)
class LoopInputs:
    """Arguments of one call of a custom decoding loop."""

    model: Any
    input_ids: Tensor  # [B, L]
    processors: Any
    criteria: Any
    config: Any
    model_kwargs: dict[str, Any]


def speculate(
    drafter: UserDrafterSpec = DEFAULT_DRAFTER,
    *,
    num_speculative_tokens: int | str | None = None,
    verify: str | Rule = "auto",
    tokenizer: Any = None,
    streamer: Any = None,
    fused: bool = False,
) -> Speculation:
    """Make a decoding loop for `model.generate(..., custom_generate=foredraft.speculate(...))`.

    Batches (left-padded), sampling, num_return_sequences, logits processors, max_time, output_scores and a streamer
    work. Keep the loop for many calls: it holds one engine per model.

    Calls from several threads on one model take turns by a lock of that model, also calls of different loops. Threads
    that share an encoder-decoder model must call the loop's method `generate`: `model.generate` runs the encoder
    before the lock. Plain calls of the model must not run beside them. For requests in one batch use `LLM`.

    Args:
        drafter: as for `LLM`; default the assistant_model of generate(), or prompt lookup without one.
        num_speculative_tokens: draft length as in `LLM`; None = chosen at every step from measured times.
        verify: verification rule, as for `LLM`.
        tokenizer: needed for stop strings, and for draft models of another vocabulary.
        streamer: receives the tokens of a batch of one; one given to generate() does the same.
        fused: run a recognised model natively on CPU, from a copy of its weights made at the first call.

    Returns:
        A callable for `custom_generate`, whose method `generate(model, inputs, **kwargs)` also takes stop_strings.

    Raises:
        ForedraftError: at the call, for beams, and for processors or criteria that have no counterpart here.
    """
    return Speculation(
        SpeculateSettings(drafter, num_speculative_tokens, verify, fused, tokenizer), CallOptions(streamer)
    )


def generate(
    model: Any,
    inputs: Tensor | None = None,
    *,
    drafter: UserDrafterSpec = DEFAULT_DRAFTER,
    num_speculative_tokens: int | str | None = None,
    verify: str | Rule = "auto",
    tokenizer: Any = None,
    fused: bool = False,
    **kwargs: Any,
) -> Any:
    """Call transformers' `model.generate(inputs, **kwargs)` with speculative decoding.

    The arguments before `kwargs` are those of `speculate`. `streamer`, `assistant_model` and `stop_strings` work. One
    engine is made per call; for many calls keep `loop = foredraft.speculate(...)` and use `loop.generate(model, ...)`.
    Calls from several threads on one model take turns.

    Raises:
        ForedraftError: for what cannot be honoured, and for text in place of token ids.
    """
    loop = speculate(
        drafter, num_speculative_tokens=num_speculative_tokens, verify=verify, tokenizer=tokenizer, fused=fused
    )
    return loop.generate(model, inputs, **kwargs)


def _check_arguments(model: Any, inputs: Any) -> None:
    """Raise ForedraftError for a model or inputs of the wrong type."""
    if not hasattr(model, "generate") or isinstance(model, LLM):
        raise ForedraftError(
            f"generate takes a loaded transformers model, got {type(model).__name__}; foredraft.LLM takes a folder or "
            "hub id, and has a method generate of its own"
        )
    if inputs is not None and not isinstance(inputs, Tensor):
        raise ForedraftError(
            f"generate takes token ids as a tensor, got {type(inputs).__name__}; pass "
            "**tokenizer(text, return_tensors='pt'), or use foredraft.LLM(model, tokenizer=tokenizer).generate(text)"
        )


@contextmanager
def _in_turn(*models: Any) -> Iterator[None]:
    """Hold the locks of the models; always in one order, so that two threads never wait for each other."""
    with _MAKING:
        locks = [_LOCKS.setdefault(model, threading.RLock()) for model in models if model is not None]
    with ExitStack() as held:
        for lock in sorted(locks, key=id):
            held.enter_context(lock)
        yield


@contextmanager
def _restore_attention(*models: Any) -> Iterator[None]:
    """Give every model its own attention back afterwards: with ours a plain forward pass fails."""
    before = [(model, attention.read_implementations(model)) for model in models if model is not None]
    try:
        yield
    finally:
        for model, names in before:
            model.set_attn_implementation(names)


def _check_supported(config: Any, model_kwargs: dict[str, Any], streamer: Any, num_rows: int) -> None:
    for name in _UNSUPPORTED_OUTPUTS:
        if getattr(config, name, False):
            raise ForedraftError(f"{name} is not available with foredraft.speculate; drop it or use plain generate()")
    if (config.num_beams or 1) > 1:
        raise ForedraftError("beam search cannot be speculated losslessly; use num_beams=1")
    for name in _CACHE_INPUTS:
        cache = model_kwargs.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise ForedraftError(f"a filled {name} cannot be continued; pass the whole text as input_ids")
    unknown = sorted(k for k, v in model_kwargs.items() if k not in _DERIVED_INPUTS and v is not None)
    if unknown:
        raise ForedraftError(
            f"the model input {unknown[0]!r} is not supported with foredraft.speculate; drop it or use plain generate()"
        )
    if streamer is not None and num_rows > 1:
        raise ForedraftError("a streamer takes one sequence; use it with a batch of one")


def _unpad_prompts(input_ids: Tensor, mask: Tensor | None) -> list[Prompt]:
    return [row[keep.bool()].tolist() for row, keep in zip(input_ids, _get_mask(input_ids, mask), strict=True)]


def _build_encoder_prompts(input_ids: Tensor, states: Tensor, mask: Tensor | None) -> list[Prompt]:
    """Prompts of an encoder-decoder: generate()'s own encoder states of every row [B, S, H], and the first tokens."""
    kept = _get_mask(states[..., 0], mask).bool() if mask is None or mask.shape == states.shape[:2] else None
    rows = states if kept is None else [row[keep] for row, keep in zip(states, kept, strict=True)]
    return [PreparedPrompt(EncoderSource(states=row), ids.tolist()) for row, ids in zip(rows, input_ids, strict=True)]


def _generate_rows(
    llm: LLM, input_ids: Tensor, prompts: list[Prompt], plan: GenerationPlan, options: CallOptions
) -> list[list[int]]:
    """Generate the new tokens of every row."""
    # torch.manual_seed governs generate(); the seeds sampled here make it govern this loop too
    seeds = torch.randint(1 << 62, (len(prompts),)).tolist()
    params = [s if s.is_greedy else replace(s, seed=seed) for s, seed in zip(plan.samplings, seeds, strict=True)]
    outputs: list[list[int]] = [[] for _ in prompts]
    streamer = options.streamer
    if streamer is not None and not options.has_prompt:
        streamer.put(input_ids.cpu())
    with closing(llm.stream(prompts, params)) as deltas:  # type: ignore[type-var]
        for delta in deltas:
            outputs[delta.index] += delta.token_ids
            if streamer is not None:
                for token in delta.token_ids:
                    streamer.put(torch.tensor([token]))
            if plan.deadline is not None and time.time() > plan.deadline:
                break
    if streamer is not None:
        streamer.end()
    plan.check_processors()
    return outputs


def _get_mask(input_ids: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones_like(input_ids) if mask is None else mask


def _pad_outputs(input_ids: Tensor, outputs: list[list[int]], pad_id: int) -> Tensor:
    """Join prompts [B, L] and outputs into [B, L + longest output]."""
    longest = max(map(len, outputs))
    tail = [row + [pad_id] * (longest - len(row)) for row in outputs]
    return torch.cat([input_ids, torch.tensor(tail, dtype=input_ids.dtype, device=input_ids.device)], 1)
