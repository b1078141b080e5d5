"""`LLM`: the public entry point, a target model with a drafter that generates text."""

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from foredraft import zoo
from foredraft.chat import Conversation, encode_chat, has_chat_template, list_conversations
from foredraft.draft_length.costs import CostCurve
from foredraft.drafter_factory import DrafterFactory, choose_builtin_method
from foredraft.drafters.user_spec import AUTO, DraftLength
from foredraft.drafters.user_spec import UserDrafterSpec as UserDrafterSpec
from foredraft.engine.calibrate import measure_pass_times
from foredraft.engine.shared_engine import CLOSED_ERROR, SharedEngine
from foredraft.engine.transcript import Transcript
from foredraft.engine_setup import EngineSetup, create_length_policy
from foredraft.errors import ForedraftError
from foredraft.kernels.process import check_process
from foredraft.kv.sizing import MemoryLimits as MemoryLimits
from foredraft.models.prompts import Prompt, find_end_ids, list_prompts
from foredraft.outputs import Completion, Delta
from foredraft.request_factory import RequestFactory
from foredraft.request_options import RequestOptions
from foredraft.sampling.grammar import GrammarCompiler
from foredraft.sampling.params import Sampling
from foredraft.target_loading import load_target
from foredraft.verification.registry import find_rule
from foredraft.verification.rule import Rule

log = logging.getLogger(__name__)
DEFAULT_DRAFTER = "default"  # the built-in drafter for LLM() and "builtin-seq2seq", otherwise none
# Attributes that `close` deletes.
FREED_ATTRIBUTES = ("target", "drafter", "tokenizer", "engine", "_shared", "_requests")


class LLM:
    """Target model with a drafter; `LLM()` is the built-in pair.

    Example:
        >>> with LLM("Qwen/Qwen2.5-0.5B", drafter="ngram") as llm:
        ...     print(llm.generate("Once upon a time", Sampling(temperature=0.0, max_tokens=64))[0].text)

    Args:
        model: folder, hub id, "builtin", "builtin-seq2seq" or loaded transformers model. Default None = "builtin". For
            an encoder-decoder model, a prompt is the input of its encoder.
        drafter: method name, several as "a+b", "auto" (the best available), dict with the keys of vLLM's
            speculative_config, `Drafter`, or None for plain decoding. Default: the built-in one for `LLM()` and
            "builtin-seq2seq", else None.
        dtype: default "auto", the dtype of the checkpoint. float16 on CPU is refused.
        quantization: "int8" or "int4" weights on CPU, rounded while loading. Default None = off. A drafter has its own
            option `quantization`.
        device: "cpu", "cuda" or "cuda:N". Default "auto" = the first GPU, else the CPU.
        verify: a verification rule or its name. Default "auto" = `match` for greedy and seeded requests, else `reject`.
        num_speculative_tokens: longest draft. Default "auto" = chosen at every step from measured times, possibly 0.
        tokenizer: a tokenizer, or None. Default "auto" = that of the folder or hub id; none for a loaded model.
        limits: sizes of KV memory and steps. Default None = `MemoryLimits()`.
        max_model_len: longest sequence in tokens, prompt and output together. Default None = the model's own.
        fused: run recognised models as native code on CPU. Default None = if loaded here or quantized. True = also a
            loaded model, from a packed copy of its current weights; an error if that is impossible.
        is_debug: check invariants after every step. Default False.

    Raises:
        ForedraftError: one line that says what to do.

    Threads may share an LLM: their requests are decoded in one batch, and every output is the same as alone. If a step
    raises, it raises in the thread that ran it; the other threads continue. A `Worker` reserves its LLM while it runs.
    An LLM does not survive a fork and cannot be pickled: create one in each spawned process. Its memory is freed with
    the last reference, or by `close`, which a `with` block calls.
    """

    def __init__(
        self,
        model: str | Path | Any | None = None,
        drafter: UserDrafterSpec = DEFAULT_DRAFTER,
        *,
        dtype: str | torch.dtype = "auto",
        quantization: str | None = None,
        device: str | torch.device = "auto",
        verify: str | Rule = "auto",
        num_speculative_tokens: DraftLength = AUTO,
        tokenizer: Any = "auto",
        limits: MemoryLimits | None = None,
        max_model_len: int | None = None,
        fused: bool | None = None,
        is_debug: bool = False,
    ) -> None:
        check_process()
        rule = find_rule(verify)
        self.limits = limits or MemoryLimits()
        loaded = load_target(
            model, dtype=dtype, quantization=quantization, device=device, tokenizer=tokenizer,
            max_model_len=max_model_len, fused=fused,
        )  # fmt: skip
        self.target, self.tokenizer = loaded.model, loaded.tokenizer
        self.builtin, self.fused = loaded.builtin, loaded.fused
        self._requests = RequestFactory(
            self.target, self.tokenizer, GrammarCompiler(self.tokenizer, self.target.vocab_size),
            find_end_ids(self.target, self.tokenizer), rule, self.limits.prefix_cache,
        )  # fmt: skip
        self._has_warned_chat_template = False
        if drafter == DEFAULT_DRAFTER:
            is_plain = self.builtin is None or model == zoo.DEFAULT_TARGET
            drafter = None if is_plain else choose_builtin_method(self.builtin or zoo.DEFAULT_TARGET)
        self._set_drafter(drafter, num_speculative_tokens, is_debug)

    @property
    def is_builtin(self) -> bool:
        """Whether the target is the default one."""
        return self.builtin == zoo.DEFAULT_TARGET

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the target."""
        return self.target.num_parameters

    @property
    def drafter_name(self) -> str:
        """Name of the drafter's method; "none" for plain decoding."""
        return self._drafter_name

    @property
    def rule(self) -> Rule | None:
        """Verification rule of all requests; None = chosen for every request."""
        return self._requests.rule

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end an output."""
        return self._requests.end_ids

    def with_drafter(
        self, drafter: UserDrafterSpec, num_speculative_tokens: DraftLength = AUTO, verify: str | Rule | None = None
    ) -> "LLM":
        """Return an LLM with the same loaded target, another drafter and new KV memory; verify None = as here."""
        other = copy.copy(self)
        other.target = self.target.with_new_kv()
        rule = self.rule if verify is None else find_rule(verify)
        other._requests = replace(
            self._requests, target=other.target, rule=rule, shares_prefixes=self.limits.prefix_cache
        )
        other._set_drafter(drafter, num_speculative_tokens, self.engine.is_debug)
        return other

    def close(self) -> None:
        """Free the model and its memory. LLMs from `with_drafter` stay usable; all other use raises ForedraftError.

        Raises:
            ForedraftError: if a Worker runs this LLM.
        """
        if "_shared" in vars(self):
            self._shared.close()
            for name in FREED_ATTRIBUTES:
                delattr(self, name)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> NoReturn:
        """Raise ForedraftError for an attribute that `close` has deleted, AttributeError for any other."""
        if name in FREED_ATTRIBUTES:
            raise ForedraftError(CLOSED_ERROR)
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
        """Generate completions of every prompt, `n` samples each, in order.

        Args:
            prompts: a string, a list of token ids, a `Seq2Seq` for an encoder-decoder model, or a list of these. The
                chat template of the model is not applied; `chat` applies it.
            sampling: one for all prompts, or one per prompt. Default None = `Sampling()`: temperature 1.0, at most 128
                tokens. The default temperature of the command line is 0.0.

        Returns:
            One completion per prompt and sample. A request that fails alone has finish_reason "error".

        Raises:
            ForedraftError: for invalid prompts or options, and for requests that do not fit into the KV memory.
        """
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
        """Answer one conversation, or each of several, with the chat template of the model.

        Args:
            messages: dicts with `role` and `content`, oldest first; a list of such lists is several conversations.
            sampling: as for `generate`.
            chat_template: Jinja source. Default None = the template of the model.
            template_options: further variables of the template, such as {"enable_thinking": False}. Default None.

        Raises:
            ForedraftError: for malformed messages, or without a template.
        """
        prompts = [
            self.encode_chat(one, chat_template=chat_template, template_options=template_options)
            for one in list_conversations(messages)
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
        """Return one conversation as token ids for `generate` or `stream`; arguments as in `foredraft.chat`."""
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
        """Yield deltas while text is generated; arguments and errors as for `generate`.

        Leaving the loop early aborts the requests that have not finished.
        """
        return self._read_deltas(self._prepare_requests(prompts, sampling))

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Completion]:
        """Run `generate` without blocking the event loop. Cancelling aborts the requests."""
        async with aclosing(self.astream(prompts, sampling)) as deltas:
            done = {delta.index: delta.completion async for delta in deltas if delta.completion}
        return [done[index] for index in sorted(done)]

    async def astream(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Run `stream` without blocking the event loop: steps run on a thread, errors are raised at the first delta.

        Cancelling aborts the requests. So does `aclose` after leaving the loop early: use contextlib.aclosing.
        """
        transcripts = await asyncio.to_thread(self._prepare_requests, prompts, sampling)
        async with aclosing(self._shared.read_async(transcripts)) as deltas:
            async for delta in deltas:
                yield delta

    def _prepare_requests(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None
    ) -> list[Transcript]:
        self._shared.check()
        several = list_prompts(prompts)
        self._warn_about_chat_template(several)
        transcripts = self._prepare_prompts(several, sampling or Sampling())
        for transcript in transcripts:
            self.engine.check(transcript.request)
        return transcripts

    def _warn_about_chat_template(self, prompts: list[Prompt]) -> None:
        """Log once that text goes to an instruct model without its chat template."""
        if (
            not self._has_warned_chat_template
            and self.has_chat_template
            and any(isinstance(prompt, str) for prompt in prompts)
        ):
            self._has_warned_chat_template = True
            log.warning(
                "the model has a chat template, and prompts given as text do not go through it; "
                "LLM.chat puts messages into the template"
            )

    def _read_deltas(self, transcripts: list[Transcript]) -> Iterator[Delta]:
        # Requests are added when the stream is first read, so a stream that is never read holds no pages.
        return self._shared.read(transcripts)

    def _prepare_prompts(self, prompts: list[Prompt], sampling: Sampling | Sequence[Sampling]) -> list[Transcript]:
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
        """Check one prompt and return its n samples, ready for an engine. Any thread may call it.

        Raises:
            ForedraftError: for a prompt or an option that this model does not support.
        """
        return self._requests.prepare(prompt, s, options or RequestOptions(), first_index)

    def _set_drafter(self, drafter: UserDrafterSpec, num_tokens: DraftLength, is_debug: bool) -> None:
        drafters = DrafterFactory(self.target, self.tokenizer, self.fused, self.builtin)
        setup = EngineSetup.make(drafters, drafter, num_tokens, self.limits, is_debug)
        self.drafter, self._drafter_name, self.is_adaptive = setup.drafter, setup.drafter_name, setup.is_adaptive
        self.engine = setup.engine
        self._shared = SharedEngine(self.engine)

    def calibrate(self, most_seconds: float = 2.0) -> list[tuple[int, float]]:
        """Measure the time of a forward pass by its rows, within about `most_seconds`, for adaptive draft lengths.

        Returns [(rows, seconds)]. Raises ForedraftError if there are requests.
        """
        check_process()
        with self._shared.claim_engine() as engine:
            if engine.has_work:
                raise ForedraftError("calibrate measures an idle engine; call it before there are requests")
            allocator, source = engine.scheduler.allocator, self.target.calibration_source
            points = measure_pass_times(self.target, allocator, self.target.device, most_seconds, source=source)
            if self.is_adaptive:
                engine.length_policy = create_length_policy(self.drafter, CostCurve(points))
        return points
