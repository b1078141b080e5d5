"""The front door: a model, a drafter, and text in and out."""

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NoReturn

import torch

from foredraft import zoo
from foredraft.chat import Conversation, conversations, encode_chat, has_chat_template
from foredraft.completion import Completion, Delta
from foredraft.controller import Adaptive, Fixed, Lengths
from foredraft.costs import CostCurve
from foredraft.drafters.base import methods
from foredraft.drafters.spec import AUTO, DraftLength, draft_length, longest_draft
from foredraft.drafters.spec import DrafterSpec as DrafterSpec
from foredraft.drafting import DrafterFactory
from foredraft.engine.calibrate import pass_times
from foredraft.engine.engine import Engine
from foredraft.engine.output import Transcript
from foredraft.engine.scheduler import Limits
from foredraft.engine.shared import CLOSED, SharedEngine
from foredraft.errors import ForedraftError
from foredraft.grammar import Grammars
from foredraft.kernels.cpu.library import library
from foredraft.kernels.process import check_process
from foredraft.kernels.quantize import check_quantization
from foredraft.kv.blocks import PageAllocator
from foredraft.kv.sizing import MemoryLimits as MemoryLimits
from foredraft.models.adopt import adopt, why_not_native
from foredraft.models.load import load_model, load_tokenizer, parse_device, width
from foredraft.models.prompts import Prompt, end_ids_of, listed
from foredraft.preparation import RequestFactory
from foredraft.request import RequestOptions
from foredraft.sampling import Sampling
from foredraft.verify import RULES
from foredraft.watched import Watched

log = logging.getLogger(__name__)
DEFAULT = "default"  # a drafter: the built-in one beside the built-in target, otherwise none
VERIFY = ("auto", *RULES)
FREED = ("target", "drafter", "tokenizer", "engine", "_shared", "_grammars", "_requests")  # by close


class LLM:
    """A target model with a drafter. `LLM()` alone is the built-in pair.

    model: a folder, a hub id, "builtin", "builtin-seq2seq", or a loaded transformers model; an encoder-decoder model
    takes prompts as what its encoder reads. drafter: None (plain decoding), a method name, several as "a+b", "auto"
    (the best there are), a dict with the keys of vLLM's speculative_config, or a Drafter. verify: "auto" (a seeded or
    greedy request uses `match`, any other `reject`) or a rule by name. fused: run recognised models as native code on
    CPU; None = those loaded here; True = also one handed over, from a packed copy of its weights as they are now, or an
    error. quantization: "int8" or "int4" weights on CPU, rounded from the ordinary ones while loading; the drafter has
    a `quantization` of its own.
    max_model_len: context in tokens, prompt and output together; None = the model's own.
    num_speculative_tokens: the longest draft; "auto": as long as measurement says it pays, at times not at all.
    Raises ForedraftError with one line that says what to do.

    Threads may share one: their requests are decoded together, a thread that lacks a token does a step for all, and the
    texts are those each would get alone. A step that raises, or is interrupted, does so in the thread that did it; the
    others go on. `astream` and `agenerate` are the same for an event loop. A Worker has its LLM to itself while it
    runs. An LLM does not survive a fork: make one in each process, and spawn the processes. It cannot be pickled. Its
    memory is free once the last reference is gone, or by `close`, which a `with` block calls.
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
        max_model_len: int | None = None,
        fused: bool | None = None,
        is_debug: bool = False,
    ) -> None:
        check_process()
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
            self.tokenizer = load_tokenizer(name, width(loaded)) if isinstance(tokenizer, str) else tokenizer
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
        self.target = adopt(loaded, name, is_fused, is_ours, quantization).with_context(max_model_len)
        self._grammars = Grammars(self.tokenizer, self.target.vocab_size)
        self._is_debug = is_debug
        self._has_hinted = False
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
        return self._requests.end_ids

    def with_drafter(
        self, drafter: DrafterSpec, num_speculative_tokens: DraftLength = AUTO, verify: str | None = None
    ) -> "LLM":
        """The same loaded target with another drafter and KV memory of its own."""
        other = copy.copy(self)
        other.target = self.target.sibling()
        other._equip(drafter, num_speculative_tokens, verify or self.verify)
        return other

    def close(self) -> None:
        """Free the model and its memory now. Streams that are open raise at their next token, and so does all other
        use; LLMs made of this one by with_drafter go on. Raises ForedraftError while a Worker runs it."""
        if "_shared" in vars(self):
            self._shared.close()
            for name in FREED:
                delattr(self, name)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> NoReturn:
        """For what is not there."""
        if name in FREED:
            raise ForedraftError(CLOSED)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __copy__(self) -> "LLM":
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM holds native memory and cannot be pickled or copied deeply: make one in each process, or use "
            "with_drafter for a second engine on the same weights"
        )

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Completion]:
        """Complete every prompt, n samples each, in order. Prompts are strings or lists of token ids, or Seq2Seq for a
        model with an encoder. Text is taken as it is, without the model's chat template; `chat` applies that."""
        done = {delta.index: delta.completion for delta in self.stream(prompts, sampling) if delta.completion}
        return [done[index] for index in sorted(done)]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Answer one conversation, or each of several, in the model's chat template.

        Args:
            messages: dicts with `role` and `content`, oldest first; a list of such lists is several conversations.
            sampling: as for `generate`.
            chat_template: Jinja source in place of the model's own.
            template_options: further variables of the template, for instance {"enable_thinking": False}.

        Raises:
            ForedraftError: for malformed messages, or without a template.
        """
        prompts = [
            self.encode_chat(one, chat_template=chat_template, template_options=template_options)
            for one in conversations(messages)
        ]
        return self.generate(prompts, sampling)

    def encode_chat(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of one conversation, a prompt for `generate` and `stream`; arguments as in `foredraft.chat`."""
        return encode_chat(
            self.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_options=template_options,
            is_source=self.target.has_encoder,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template, as instruct models do."""
        return has_chat_template(self.tokenizer)

    @property
    def context_length(self) -> int:
        """Longest sequence in tokens, prompt and output together."""
        return self.target.context_length

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> Iterator[Delta]:
        """The same, piece by piece as the text comes; leaving the loop early aborts what is left."""
        return self._drain(self._admitted(prompts, sampling))

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Completion]:
        """As generate, for an event loop, which is never blocked; cancelling aborts what is left."""
        async with aclosing(self.astream(prompts, sampling)) as deltas:
            done = {delta.index: delta.completion async for delta in deltas if delta.completion}
        return [done[index] for index in sorted(done)]

    async def astream(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> AsyncGenerator[Delta, None]:
        """As stream, for an event loop: steps are done on a thread. Cancelling, or `aclose` after leaving the loop
        early (contextlib.aclosing), aborts what is left. Errors are raised at the first delta."""
        transcripts = await asyncio.to_thread(self._admitted, prompts, sampling)
        async with aclosing(self._shared.read_async(transcripts)) as deltas:
            async for delta in deltas:
                yield delta

    def _admitted(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None
    ) -> list[Transcript]:
        self._shared.check()
        several = listed(prompts)
        self._hint_at_chat(several)
        transcripts = self._transcripts(several, sampling or Sampling())
        for transcript in transcripts:
            self.engine.check(transcript.request)
        return transcripts

    def _hint_at_chat(self, prompts: list[Prompt]) -> None:
        """Log once that text goes to an instruct model without its chat template."""
        if not self._has_hinted and self.has_chat_template and any(isinstance(prompt, str) for prompt in prompts):
            self._has_hinted = True
            log.warning(
                "the model has a chat template, and prompts given as text do not go through it; "
                "LLM.chat puts messages into the template"
            )

    def _drain(self, transcripts: list[Transcript]) -> Iterator[Delta]:
        # not before the stream is read: one that never is must not hold pages
        return self._shared.read(transcripts)

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
        return self._requests.prepare(prompt, s, options or RequestOptions(), first_index)

    def _equip(self, drafter: DrafterSpec, num_tokens: DraftLength, verify: str) -> None:
        self.verify = verify
        limits = self.limits
        self._requests = RequestFactory(
            self.target,
            self.tokenizer,
            self._grammars,
            end_ids_of(self.target, self.tokenizer),
            verify,
            limits.prefix_cache,
        )
        drafters = DrafterFactory(self.target, self.tokenizer, self.fused, self.builtin)
        length = draft_length(drafter, num_tokens)
        longest = longest_draft(drafter) if length is None else length
        self.drafter, self._drafter_name = drafters.make(drafter, longest)
        attach = getattr(self.drafter, "attach", None)
        if attach is not None:  # it drafts in the target's own memory
            attach(self.target)
        self.is_adaptive = length is None and (self.drafter is None or isinstance(drafter, (str, dict)))
        memory = getattr(self.drafter, "memory", None)
        per_token = self.target.bytes_per_token() + (0 if memory is None else memory.bytes_per_token)
        num_pages = limits.num_pages(self.target.context_length, per_token, self.target.device)
        for pool in (self.target.pool, *([] if memory is None else [memory.pool])):
            pool.capacity = num_pages * limits.page_size
        self.engine = Engine(
            self.target,
            drafters.with_predictions(self.drafter, self._drafter_name),
            PageAllocator(num_pages, limits.page_size),
            Limits(limits.max_batch, limits.max_step_tokens),
            self.target.device,
            is_debug=self._is_debug,
            prefix_cache=limits.prefix_cache,
            lengths=self._lengths(),
        )
        self._shared = SharedEngine(self.engine)

    def _lengths(self, curve: CostCurve | None = None) -> Lengths:
        if not self.is_adaptive:
            return Fixed()
        return Watched(curve) if getattr(self.drafter, "decides_length", False) else Adaptive(curve)

    def calibrate(self, most_seconds: float = 2.0) -> list[tuple[int, float]]:
        """Measure what a pass costs by its rows, [(rows, seconds)], so that adaptive lengths need not find it out on
        the way: for a server at its start. Raises ForedraftError while requests run."""
        check_process()
        with self._shared.claimed() as engine:
            if engine.has_work:
                raise ForedraftError("calibrate measures an idle engine; call it before there are requests")
            allocator, source = engine.scheduler.allocator, self.target.measured_source
            points = pass_times(self.target, allocator, self.target.device, most_seconds, source=source)
            if self.is_adaptive:
                engine.lengths = self._lengths(CostCurve(points))
        return points
