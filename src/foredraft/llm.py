"""The front door: a model, a drafter, and text in and out."""

import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from foredraft import zoo
from foredraft.completion import Completion, Delta
from foredraft.controller import Adaptive, Fixed, Lengths
from foredraft.costs import CostCurve
from foredraft.drafters.base import Context, Drafter, configured, meant_by, methods, reads_model
from foredraft.drafters.overlay import Overlay
from foredraft.drafters.prediction import Prediction
from foredraft.engine.calibrate import pass_times
from foredraft.engine.engine import Engine
from foredraft.engine.guard import Guard
from foredraft.engine.output import Transcript
from foredraft.engine.scheduler import Limits
from foredraft.errors import ForedraftError
from foredraft.grammar import Grammars, Matcher
from foredraft.kernels.cpu.library import library
from foredraft.kernels.quantize import check_quantization
from foredraft.kv.blocks import PageAllocator
from foredraft.kv.sizing import MemoryLimits as MemoryLimits
from foredraft.models.adopt import adopt, why_not_native
from foredraft.models.load import load_model, load_tokenizer, parse_device
from foredraft.models.prompts import Prompt, read_prompt
from foredraft.models.tokenizing import encode
from foredraft.request import Request, RequestOptions
from foredraft.sampling import Sampling
from foredraft.source import Begun, Seq2Seq
from foredraft.verify import RULES
from foredraft.watched import Watched

DrafterSpec = None | str | dict[str, Any] | Drafter
DEFAULT = "default"  # a drafter: the built-in one beside the built-in target, otherwise none
AUTO = "auto"  # a draft length found by measurement...
AUTO_TOKENS = 8  # ... and the longest it may be
DraftLength = int | str | None
PREDICTED_TOKENS = 15  # of a draft from a request's prediction: sixteen rows, which one pass takes well
VERIFY = ("auto", *RULES)


class LLM:
    """A target model with a drafter. `LLM()` alone is the built-in pair.

    model: a folder, a hub id, "builtin", "builtin-seq2seq", or a loaded transformers model; an encoder-decoder model
    takes prompts as what its encoder reads. drafter: None (plain decoding), a method name, several as "a+b", "auto"
    (the best there are), a dict with the keys of vLLM's speculative_config, or a Drafter. verify: "auto" (a seeded or
    greedy request uses `match`, any other `reject`) or a rule by name. fused: run recognised models as native code on
    CPU; None = those loaded here; True = also one handed over, from a packed copy of its weights as they are now, or an
    error. quantization: "int8" or "int4" weights on CPU, rounded from the ordinary ones while loading; the drafter has
    a `quantization` of its own.
    num_speculative_tokens: the longest draft; "auto": as long as measurement says it pays, at times not at all.
    Raises ForedraftError with one line that says what to do.
    """

    def __init__(
        self,
        model: str | Path | Any | None = None,
        drafter: DrafterSpec = DEFAULT,
        *,
        dtype: str | torch.dtype = "auto",
        quantization: str | None = None,
        device: str | torch.device = "auto",
        verify: str = "auto",
        num_speculative_tokens: DraftLength = AUTO,
        tokenizer: Any = "auto",
        limits: MemoryLimits | None = None,
        fused: bool | None = None,
        is_debug: bool = False,
    ) -> None:
        if verify not in VERIFY:
            raise ForedraftError(f"unknown verification rule {verify!r}; use one of {', '.join(VERIFY)}")
        check_quantization(quantization)
        self.limits = limits or MemoryLimits()
        self.builtin = zoo.target_name(model)
        self.is_builtin = self.builtin == zoo.FIRST
        name = model if self.builtin is None else str(zoo.target(self.builtin))
        if isinstance(name, (str, Path)):
            name = str(name)
            loaded = load_model(name, dtype, parse_device(device))
            self.tokenizer = load_tokenizer(name) if isinstance(tokenizer, str) else tokenizer
        else:
            loaded, name = name, getattr(name, "name_or_path", "") or type(name).__name__
            self.tokenizer = None if isinstance(tokenizer, str) else tokenizer
        if loaded.dtype in (torch.float16,) and loaded.device.type == "cpu":
            raise ForedraftError("float16 is slow and inexact on CPU; use dtype='bfloat16' or 'float32'")
        is_ours = isinstance(model, (str, Path)) or model is None
        # without the kernels there is a warning, and everything runs on torch
        why = why_not_native(loaded) if fused and library() is not None else None
        if why is not None:
            raise ForedraftError(f"{name} cannot run as native code ({why}); leave fused out")
        self.fused = fused is not False
        is_fused = is_ours or quantization is not None if fused is None else fused
        self.target = adopt(loaded, name, is_fused, is_ours, quantization)
        self._grammars = Grammars(self.tokenizer, self.target.vocab_size)
        self._is_debug = is_debug
        if drafter == DEFAULT:
            is_plain = self.builtin is None or model == zoo.FIRST
            drafter = None if is_plain else zoo.drafter_of(self.builtin or zoo.FIRST, methods())
        self._equip(drafter, num_speculative_tokens, verify)

    @property
    def num_parameters(self) -> int:
        return self.target.num_parameters

    @property
    def drafter_name(self) -> str:
        return self._drafter_name

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end a text."""
        return self._eos_ids

    def with_drafter(
        self, drafter: DrafterSpec, num_speculative_tokens: DraftLength = AUTO, verify: str | None = None
    ) -> "LLM":
        """The same loaded target with another drafter and KV memory of its own."""
        other = copy.copy(self)
        other.target = self.target.sibling()
        other._equip(drafter, num_speculative_tokens, verify or self.verify)
        return other

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Completion]:
        """Complete every prompt, n samples each, in order. Prompts are strings or lists of token ids, or Seq2Seq for a
        model with an encoder."""
        done: dict[int, Completion] = {}
        for delta in self.stream(prompts, sampling):
            if delta.completion is not None:
                done[delta.index] = delta.completion
        return [done[index] for index in sorted(done)]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> Iterator[Delta]:
        """The same, piece by piece as the text comes; leaving the loop early aborts what is left."""
        transcripts = self._transcripts(_as_list(prompts), sampling or Sampling())
        for transcript in transcripts:
            self.engine.check(transcript.request)
        return self._drain(transcripts)

    def _drain(self, transcripts: list[Transcript]) -> Iterator[Delta]:
        try:
            # not before the stream is read: one that never is must not hold pages
            for transcript in transcripts:
                self.engine.add(transcript)
            while transcripts:
                self.engine.step()
                for transcript in transcripts:
                    while transcript.deltas:
                        yield transcript.deltas.popleft()
                transcripts = [t for t in transcripts if not t.is_finished or t.deltas]
        finally:
            for transcript in transcripts:
                self.engine.abort(transcript.request)

    def _transcripts(self, prompts: list[Prompt], sampling: Sampling | Sequence[Sampling]) -> list[Transcript]:
        params = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(params) != len(prompts):
            raise ForedraftError(f"{len(prompts)} prompts and {len(params)} Samplings; give one Sampling or one each")
        result: list[Transcript] = []
        for prompt, s in zip(prompts, params, strict=True):
            result += self.prepare(prompt, s, first_index=len(result))
        return result

    def prepare(
        self, prompt: Prompt, s: Sampling, options: RequestOptions | None = None, first_index: int = 0
    ) -> list[Transcript]:
        """The n samples of one prompt, checked and ready for an engine. Touches no engine, so any thread may call it.

        Raises ForedraftError for what this model cannot do.
        """
        ids, source = read_prompt(self.target, self.tokenizer, prompt)
        options = options or RequestOptions()
        self._check(s, options)
        seed = int.from_bytes(os.urandom(8), "little") if s.seed is None else s.seed
        bad_words = self._bad_words(s)
        given = prompt.source if isinstance(prompt, Seq2Seq | Begun) else prompt
        text = given if isinstance(given, str) else None
        salt = options.salt
        if source is not None:  # what the decoder's layers hold is of the source too
            salt = source.digest + salt
        if not self.limits.prefix_cache:  # one that nobody else has
            salt = os.urandom(16)
        result: list[Transcript] = []
        for sample in range(s.n):
            request = self._request(ids, s, seed, sample, bad_words, options)
            request.salt, request.source = salt, source
            request.after = result[0].request if result else None
            result.append(Transcript(request, first_index + sample, self.tokenizer, text))
        return result

    def _request(
        self,
        ids: list[int],
        s: Sampling,
        seed: int,
        sample: int,
        bad_words: tuple[tuple[int, ...], ...],
        options: RequestOptions,
    ) -> Request:
        verify = self.verify
        if verify == "auto":
            verify = "match" if s.is_greedy or s.seed is not None else "reject"
        return Request(
            slot=-1,
            prompt=ids,
            sampling=s,
            seed=seed,
            sample=sample,
            eos_ids=self._eos_ids,
            bad_words=bad_words,
            max_length=self.target.context_length,
            num_drafts=options.num_speculative_tokens,
            verify=verify,
            priority=options.priority,
            tenant=options.salt,
            prediction=options.prediction,
            matcher=self._matcher(s),
            is_traced=options.is_traced,
        )

    def _matcher(self, s: Sampling) -> Matcher | None:
        if s.grammar is None:
            return None
        return self._grammars.matcher(s.grammar, () if s.ignore_eos else self._eos_ids, s.stop_token_ids)

    def _check(self, s: Sampling, options: RequestOptions) -> None:
        size = self.target.vocab_size
        ids_of = {name: getattr(s, name) or () for name in ("allowed_token_ids", "logit_bias", "stop_token_ids")}
        ids_of["prediction"] = options.prediction
        ids_of["bad_words"] = [token for word in s.bad_words if not isinstance(word, str) for token in word]
        for name, named in ids_of.items():
            outside = [token for token in named if not 0 <= token < size]
            if outside:
                raise ForedraftError(f"{name} holds {outside[0]}, which is outside the vocabulary of {size} tokens")
        if s.stop and self.tokenizer is None:
            raise ForedraftError(
                f"{self.target.name} has no tokenizer, so stop strings cannot be found; use stop_token_ids"
            )

    def _bad_words(self, s: Sampling) -> tuple[tuple[int, ...], ...]:
        """As token ids; a string is forbidden with and without a space before it."""
        found: list[tuple[int, ...]] = []
        for word in s.bad_words:
            if not isinstance(word, str):
                found.append(word)
                continue
            if self.tokenizer is None:
                raise ForedraftError(f"{self.target.name} has no tokenizer: give bad_words as token ids")
            for spelling in (word, " " + word.lstrip()):
                found.append(tuple(encode(self.tokenizer, spelling, has_special=False).input_ids))
        return tuple(dict.fromkeys(found))

    def _equip(self, drafter: DrafterSpec, num_tokens: DraftLength, verify: str) -> None:
        self.verify = verify
        self._eos_ids = _eos_ids(self.target.model, self.tokenizer)
        length = _draft_length(drafter, num_tokens)
        self.drafter, self._drafter_name = self._make_drafter(drafter, _longest(drafter) if length is None else length)
        attach = getattr(self.drafter, "attach", None)
        if attach is not None:  # it drafts in the target's own memory
            attach(self.target)
        self.is_adaptive = length is None and (self.drafter is None or isinstance(drafter, (str, dict)))
        limits = self.limits
        memory = getattr(self.drafter, "memory", None)
        per_token = self.target.bytes_per_token() + (0 if memory is None else memory.bytes_per_token)
        num_pages = limits.num_pages(self.target.context_length, per_token, self.target.device)
        for pool in (self.target.pool, *([] if memory is None else [memory.pool])):
            pool.capacity = num_pages * limits.page_size
        self.engine = Engine(
            self.target,
            self._overlaid(),
            PageAllocator(num_pages, limits.page_size),
            Limits(limits.max_batch, limits.max_step_tokens),
            self.target.device,
            is_debug=self._is_debug,
            prefix_cache=limits.prefix_cache,
            lengths=self._lengths(),
        )

    def _lengths(self, curve: CostCurve | None = None) -> Lengths:
        if not self.is_adaptive:
            return Fixed()
        return Watched(curve) if getattr(self.drafter, "decides_length", False) else Adaptive(curve)

    def calibrate(self, most_seconds: float = 2.0) -> list[tuple[int, float]]:
        """Measure what a pass costs by its rows, [(rows, seconds)], so that adaptive lengths need not find it out on
        the way: for a server at its start. Raises ForedraftError while requests run."""
        if self.engine.has_work:
            raise ForedraftError("calibrate measures an idle engine; call it before there are requests")
        allocator, source = self.engine.scheduler.allocator, self.target.measured_source
        points = pass_times(self.target, allocator, self.target.device, most_seconds, source=source)
        if self.is_adaptive:
            self.engine.lengths = self._lengths(CostCurve(points))
        return points

    def _overlaid(self) -> Drafter:
        """What requests say their output will be goes before any other draft; each fails alone."""
        size = self.target.vocab_size
        main = None if self.drafter is None else Guard(self.drafter, size)
        return Overlay(Guard(Prediction(PREDICTED_TOKENS), size), main)

    def _make_drafter(self, spec: DrafterSpec, num_tokens: int) -> tuple[Drafter | None, str]:
        if spec is None or spec == "none":
            return None, "none"
        if not isinstance(spec, (str, dict)):
            return spec, type(spec).__name__
        options = {"method": spec} if isinstance(spec, str) else dict(spec)
        method = options.pop("method", None)
        options.pop("num_speculative_tokens", None)
        model = options.pop("model", None)
        try:
            module, implied = meant_by(method)
            if model is not None and not reads_model(module):
                raise ForedraftError(f"the method {method} drafts from the text alone; leave its model {model!r} out")
            context = self._context(module.METHOD, model, num_tokens)
            made: Drafter = module.create(configured(module, implied | options), context)
            return made, str(getattr(made, "title", method))
        except ForedraftError:
            raise
        except (TypeError, ValueError) as error:
            raise ForedraftError(str(error)) from error

    def _context(self, method: str, model: str | Path | None, num_tokens: int) -> Context:
        if num_tokens < 1:
            raise ForedraftError(
                f"num_speculative_tokens must be at least 1, got {num_tokens}; use drafter=None for none"
            )
        return Context(
            vocab_size=self.target.vocab_size,
            target=self.target,
            num_tokens=num_tokens,
            model=None if model is None else str(model),
            tokenizer=self.tokenizer,
            target_name=self.target.name,
            target_parameters=self.target.num_parameters,
            dtype=self.target.model.dtype,
            device=self.target.device,
            fused=self.fused,
            builtin=self._builtin_drafter(method),
            builtins={name: path for name in methods() if (path := self._builtin_drafter(name)) is not None},
            guarded=lambda drafter: Guard(drafter, self.target.vocab_size),
        )

    def _builtin_drafter(self, method: str) -> str | None:
        return None if self.builtin is None else zoo.builtin_drafter(method, self.builtin)


def _draft_length(spec: DrafterSpec, asked: DraftLength) -> int | None:
    """The longest draft, or None where it is to be found by measurement."""
    given = spec.get("num_speculative_tokens", AUTO) if isinstance(spec, dict) else AUTO
    count = given if asked in (AUTO, None) else asked
    if count in (AUTO, None):
        return None
    if not isinstance(count, int) or isinstance(count, bool):
        raise ForedraftError(f"num_speculative_tokens must be an integer or 'auto', got {count!r}")
    return count


def _longest(spec: DrafterSpec) -> int:
    """The longest draft where measurement finds the length; a method that lives from long ones names its own."""
    method = spec.get("method") if isinstance(spec, dict) else spec
    module = methods().get(method) if isinstance(method, str) else None
    return int(getattr(module, "AUTO_TOKENS", AUTO_TOKENS))


def _eos_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    found: list[Any] = [
        getattr(model.generation_config, "eos_token_id", None),
        model.config.get_text_config().eos_token_id,
    ]
    if tokenizer is not None:
        found.append(tokenizer.eos_token_id)
    ids: set[int] = set()
    for entry in found:
        ids |= set(entry) if isinstance(entry, (list, tuple)) else {entry} if entry is not None else set()
    return frozenset(ids)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Seq2Seq | Begun) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    if not len(prompts):
        raise ForedraftError("the prompt is empty; give at least one token of text")
    return list(prompts)  # type: ignore[arg-type]
