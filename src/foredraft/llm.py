"""`LLM`: the public entry point, a target model with a drafter that generates text."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from foredraft import zoo
from foredraft.completion_generator import CompletionGenerator
from foredraft.drafter_factory import DrafterFactory, find_default_method
from foredraft.drafters.spec import NO_DRAFT_SPEC
from foredraft.drafters.user_spec import AUTO, DraftLength, make_drafter_rule, parse_rule
from foredraft.drafters.user_spec import UserDrafterSpec as UserDrafterSpec
from foredraft.engine.calibrate import ROW_COUNTS, measure_pass_times
from foredraft.engine.shared_engine import CLOSED_ERROR, SharedEngine
from foredraft.engine_setup import EngineSetup, create_length_policy
from foredraft.errors import ForedraftError
from foredraft.kernels.process import check_process
from foredraft.kv.sizing import MemoryLimits as MemoryLimits
from foredraft.models.prompts import find_end_ids
from foredraft.request_factory import RequestFactory, choose_sampled_rule
from foredraft.sampling.grammar import GrammarCompiler
from foredraft.target_holder import TargetHolder
from foredraft.target_loading import load_target
from foredraft.verification.rule import Rule

DEFAULT_DRAFTER = "default"  # the built-in drafter for LLM() and "builtin-seq2seq", otherwise none
# Attributes that `close` deletes.
FREED_ATTRIBUTES = ("target", "drafter", "tokenizer", "engine", "_shared", "_requests")


class LLM(TargetHolder, CompletionGenerator):
    """Target model with a drafter; `LLM()` is the built-in pair.

    Example:
        >>> with LLM("Qwen/Qwen2.5-0.5B", drafter="ngram") as llm:
        ...     print(llm.generate("Once upon a time", Sampling(temperature=0.0, max_tokens=64))[0].text)

    Args:
        model: folder, hub id, GGUF file, "builtin", "builtin-seq2seq" or loaded transformers model. Default None =
            "builtin". For an encoder-decoder model, a prompt is the input of its encoder.
        drafter: method name, several as "a+b", "auto" (the best available), dict with the keys of vLLM's
            speculative_config, `Drafter`, or None for plain decoding. Default: the built-in one for `LLM()` and
            "builtin-seq2seq", else None.
        dtype: default "auto", the dtype of the checkpoint. float16 on CPU is refused.
        quantization: "int8" or "int4" weights on CPU, rounded while loading; a checkpoint on the same grid keeps its
            values. Default None = off. A drafter has its own option `quantization`.
        device: "cpu", "cuda" or "cuda:N". Default "auto" = the first GPU, else the CPU.
        verify: a verification rule or its name. Default "auto" = `match` for greedy and seeded requests, else `reject`.
            A request may name its own: `RequestOptions(verify=...)`.
        num_speculative_tokens: draft length in tokens. Default "auto" = chosen at every step from measured times,
            possibly 0. "2-6" = chosen from 2 to 6; "1:6,8:2,32:0" = by the number of requests in the step.
        tokenizer: a tokenizer, its folder or hub id, or None. Default "auto" = that of the folder or hub id.
        limits: sizes of KV memory and steps. Default None = `MemoryLimits()`.
        max_model_len: longest sequence in tokens, prompt and output together. Default None = the model's own.
        revision: branch, tag or commit of a hub id. Default None = its default branch. A drafter has its own.
        fused: run recognised models as native code on CPU. Default None = if loaded here or quantized. True = also a
            loaded model, from a packed copy of its current weights; an error if that is impossible.
        is_debug: check invariants after every step. Default False.
        tensor_parallel_size: processes on this machine over which the target is split, this one included; on GPUs, one
            GPU each. Default 1.
        lora: folder of a LoRA adapter of PEFT, which is merged into the weights after loading. Default None.
        adapters: folders of LoRA adapters by name; a request names one: `RequestOptions(adapter=NAME)`. Default None.
        shares_weights_of: loaded LLM, whose weights are used where this one has equal ones. An adapter then costs the
            memory of the layers that it changes. Default None = no weights are shared.
        exact: require equal bits of a row's logits in every pass, so that greedy and seeded outputs are those of plain
            decoding without near ties: native code on CPU, slower kernels on CUDA for dense models. Default False.
        kv_dtype: of the target's keys and values. "int8" halves their memory on CPU and changes the output a little,
            with drafts as without. Default "auto" = its own.
        max_images: images of a request at most, for a vision-language model: `ImagePrompt`, and parts of messages.
            Default 0 = its image part is not loaded.

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
        revision: str | None = None,
        fused: bool | None = None,
        is_debug: bool = False,
        tensor_parallel_size: int = 1,
        lora: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        shares_weights_of: "LLM | None" = None,
        exact: bool = False,
        kv_dtype: str = "auto",
        max_images: int = 0,
    ) -> None:
        check_process()
        self._named_rule = parse_rule(drafter, verify)
        self.limits = limits or MemoryLimits()
        loaded = load_target(
            model, dtype=dtype, quantization=quantization, device=device, tokenizer=tokenizer, lora=lora,
            max_model_len=max_model_len, fused=fused, revision=revision, tensor_parallel_size=tensor_parallel_size,
            sharer=None if shares_weights_of is None else shares_weights_of.target, exact=exact, kv_dtype=kv_dtype,
            max_images=max_images,
        )  # fmt: skip
        self.target, self.tokenizer = loaded.model, loaded.tokenizer
        self.builtin, self.fused = loaded.builtin, loaded.fused
        self._add_adapters(adapters)
        self._requests = RequestFactory(
            self.target, self.tokenizer, GrammarCompiler(self.tokenizer, self.target.vocab_size),
            find_end_ids(self.target, self.tokenizer), self._named_rule, self.limits.prefix_cache,
        )  # fmt: skip
        if drafter == DEFAULT_DRAFTER:
            is_plain = self.builtin is None or model == zoo.DEFAULT_TARGET
            drafter = None if is_plain else find_default_method(self.builtin or zoo.DEFAULT_TARGET)
        self._set_drafter(drafter, num_speculative_tokens, is_debug)

    @property
    def is_builtin(self) -> bool:
        """Whether the target is the default one."""
        return self.builtin == zoo.DEFAULT_TARGET

    @property
    def drafter_name(self) -> str:
        """Name of the drafter's method; "none" for plain decoding."""
        return self._drafter_name

    @property
    def rule(self) -> Rule | None:
        """Verification rule of requests that name none: the named one, or that of the drafter's method.

        None = chosen for every request.
        """
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
        other._named_rule = parse_rule(drafter, self._named_rule if verify is None else verify)
        other._requests = replace(self._requests, target=other.target, shares_prefixes=self.limits.prefix_cache)
        other._set_drafter(drafter, num_speculative_tokens, self.engine.is_debug)
        return other

    def close(self) -> None:
        """Free the model and its memory. LLMs from `with_drafter` stay usable; all other use raises ForedraftError.

        Raises:
            ForedraftError: if a Worker runs this LLM.
        """
        if "_shared" in vars(self):
            self._shared.close()
            self.target.close()
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

    def calibrate(self, most_seconds: float = 2.0) -> list[tuple[int, float]]:
        """Measure the time of a forward pass by its rows, within about `most_seconds`, for adaptive draft lengths.

        A target with row buckets is measured at these alone.

        Returns [(rows, seconds)]. Raises ForedraftError if there are requests.
        """
        check_process()
        with self._shared.claim_engine() as engine:
            if engine.has_work:
                raise ForedraftError("calibrate measures an idle engine; call it before there are requests")
            allocator, source = engine.scheduler.allocator, self.target.calibration_source
            buckets = self.target.row_buckets
            points = measure_pass_times(
                self.target, allocator, self.target.device, most_seconds, source=source,
                row_counts=buckets or ROW_COUNTS,
            )  # fmt: skip
            if self.is_adaptive:
                engine.length_policy = create_length_policy(self.drafter, buckets, points)
        return points

    def _set_drafter(self, drafter: UserDrafterSpec, num_tokens: DraftLength, is_debug: bool) -> None:
        drafters = DrafterFactory(self.target, self.tokenizer, self.fused, self.builtin)
        setup = EngineSetup.make(drafters, drafter, num_tokens, self.limits, is_debug)
        self.drafter, self._drafter_name, self.is_adaptive = setup.drafter, setup.drafter_name, setup.is_adaptive
        self.engine = setup.engine
        self._shared = SharedEngine(self.engine)
        spec = NO_DRAFT_SPEC if self.drafter is None else self.drafter.spec
        self._requests = replace(
            self._requests,
            rule=self._named_rule or make_drafter_rule(drafter),
            sampled_rule=choose_sampled_rule(spec, self.target.vocab_size),
        )
