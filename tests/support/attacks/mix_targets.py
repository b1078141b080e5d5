"""The targets that mixes run on: every way a pass is calculated, each with the drafters that fit it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch

from foredraft import LLM
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.draft_model.drafter import DraftModel
from foredraft.drafters.interface import Drafter
from foredraft.drafters.method import VARIANT_BRANCHING, DrafterContext
from foredraft.drafters.registry import load_methods
from foredraft.models.hf import HFModel
from tests.support import grammar_cases, tiny_models, tiny_seq2seq
from tests.support.method_cases import METHOD_CASES
from tests.support.tiny_vocabularies import CROSS_VOCAB_CASES


class DrafterMaker(Protocol):
    """Make a drafter of one entry and draft length."""

    def __call__(self, name: str, num_tokens: int) -> Drafter: ...


@dataclass(frozen=True)
class MixTarget:
    """`plain` decodes without a draft; `is_exact`: log-probabilities are equal to the last bit, not only tokens."""

    name: str
    plain: LLM
    make: DrafterMaker
    drafters: Sequence[str]
    vocab: int
    is_exact: bool

    @property
    def is_text(self) -> bool:
        """True if the target has a tokenizer: only then can requests have stop strings and grammars."""
        return self.plain.tokenizer is not None


def get_mix_target(name: str) -> MixTarget:
    """Return a target by its name in WORLDS."""
    return _MAKERS[name]()


@cache
def _make_float64() -> MixTarget:
    """torch's operators in double precision, as `fused=False` runs them."""
    made = partial(_make_drafter, tiny_models.plain())
    return MixTarget(
        "float64", _add_tokenizer(tiny_models.plain()), made, tuple(METHOD_CASES), tiny_models.VOCAB, is_exact=False
    )


@cache
def _make_native(dtype: torch.dtype, quantization: str | None = None) -> MixTarget:
    """Make a target on the native kernels; its heads are 16 wide, which the kernels support."""
    model = tiny_models.llama(hidden=64).to(dtype)
    plain = LLM(model, None, fused=True, quantization=quantization, is_debug=True)
    name = quantization or str(dtype).removeprefix("torch.")
    made = partial(_make_native_drafter, plain, dtype)
    return MixTarget(name, _add_tokenizer(plain), made, tuple(METHOD_CASES), tiny_models.VOCAB, is_exact=True)


def _add_tokenizer(llm: LLM) -> LLM:
    """The same target with a tokenizer; drafters stay fitted to the one without, which is fitted once per process."""
    other = LLM(llm.target.model, None, tokenizer=grammar_cases.make_ascii_llm().tokenizer, fused=False, is_debug=True)
    other.target = llm.target.with_new_kv()
    return other.with_drafter(None)


def _make_drafter(llm: LLM, name: str, num_tokens: int) -> Drafter:
    return METHOD_CASES[name].make(num_tokens, llm)


def _make_native_drafter(llm: LLM, dtype: torch.dtype, name: str, num_tokens: int) -> Drafter:
    method, _, variant = name.partition(", ")
    if method != "draft_model" or name in CROSS_VOCAB_CASES:
        return METHOD_CASES[name].make(num_tokens, llm)
    context = DrafterContext(vocab_size=tiny_models.VOCAB, num_speculative_tokens=num_tokens, dtype=dtype)
    branching = VARIANT_BRANCHING[:num_tokens] if variant else None
    return DraftModel(_make_native_draft(dtype).with_new_kv(), context, TreeOptions(branching=branching))


@cache
def _make_native_draft(dtype: torch.dtype) -> HFModel:
    model = tiny_models.perturb(tiny_models.llama(hidden=64), 0.04).to(dtype)
    return HFModel.wrap_model(model, "draft", is_fused=True)


SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "draft_model": ("draft_model", {}),
    "draft_model, tree": ("draft_model", {"tree_nodes": 12, "top_k": 3}),
    "ngram": ("ngram", {"prompt_lookup_min": 1}),
    "ngram, branches": ("ngram", {"prompt_lookup_min": 1, "branches": 3}),
    "ngram_lm": ("ngram_lm", {"min_confidence": 0.01}),
    "suffix": ("suffix", {"min_confidence": 0.01}),
    "suffix, store": ("suffix", {"min_confidence": 0.01, "store_tokens": 1024}),
    "lookahead": ("lookahead", {}),
    "token_recycling": ("token_recycling", {}),
}


@cache
def _make_seq2seq() -> MixTarget:
    """Make an encoder-decoder in double precision."""
    return MixTarget(
        "seq2seq", tiny_seq2seq.plain(), _make_seq2seq_drafter, tuple(SEQ2SEQ), tiny_seq2seq.VOCAB, is_exact=False
    )


def _make_seq2seq_drafter(name: str, num_tokens: int) -> Drafter:
    method, options = SEQ2SEQ[name]
    if method == "draft_model":
        return tiny_seq2seq.draft_model(num_tokens, **options)
    entry = load_methods()[method]
    context = DrafterContext(vocab_size=tiny_seq2seq.VOCAB, num_speculative_tokens=num_tokens, dtype=torch.float64)
    made: Drafter = entry.create(entry.config(**options), context)
    return made


_MAKERS = {
    "float64": _make_float64,
    "float32": partial(_make_native, torch.float32),
    "bfloat16": partial(_make_native, torch.bfloat16),
    "int8": partial(_make_native, torch.bfloat16, "int8"),
    "int4": partial(_make_native, torch.bfloat16, "int4"),
    "seq2seq": _make_seq2seq,
}
MIX_TARGETS = tuple(_MAKERS)
DRAFTERS = {name: tuple(SEQ2SEQ) if name == "seq2seq" else tuple(METHOD_CASES) for name in MIX_TARGETS}
