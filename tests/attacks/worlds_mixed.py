"""The targets that mixes run on: every way a pass is calculated, each with the drafters that fit it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch

import grammars_made
import models_made
import pairs_made
from foredraft import LLM
from foredraft.drafters.base import Context, Drafter, methods
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.growth import TreeOptions
from foredraft.models.lm import HFModel
from methods_made import FIXED, MADE
from vocab_made import TRANSLATED


class Make(Protocol):
    """A drafter of one entry and draft length."""

    def __call__(self, name: str, num_tokens: int) -> Drafter: ...


@dataclass(frozen=True)
class World:
    """`plain` decodes without a draft; `is_exact`: log-probabilities are equal to the last bit, not only tokens."""

    name: str
    plain: LLM
    make: Make
    drafters: Sequence[str]
    vocab: int
    is_exact: bool

    @property
    def is_text(self) -> bool:
        """Stop strings and grammars can be asked for."""
        return self.plain.tokenizer is not None


def world(name: str) -> World:
    """One of WORLDS."""
    return _MAKERS[name]()


@cache
def _float64() -> World:
    """torch's operators in double precision, as `fused=False` runs them."""
    made = partial(_made, models_made.plain())
    return World("float64", _with_text(models_made.plain()), made, tuple(MADE), models_made.VOCAB, is_exact=False)


@cache
def _native(dtype: torch.dtype, quantization: str | None = None) -> World:
    """The native kernels; heads sixteen wide, so that the model is recognised."""
    model = models_made.llama(hidden=64).to(dtype)
    plain = LLM(model, None, fused=True, quantization=quantization, is_debug=True)
    name = quantization or str(dtype).removeprefix("torch.")
    made = partial(_native_made, plain, dtype)
    return World(name, _with_text(plain), made, tuple(MADE), models_made.VOCAB, is_exact=True)


def _with_text(llm: LLM) -> LLM:
    """The same target with a tokenizer; drafters stay fitted to the one without, which is fitted once per process."""
    other = LLM(llm.target.model, None, tokenizer=grammars_made.speaker().tokenizer, fused=False, is_debug=True)
    other.target = llm.target.sibling()
    return other.with_drafter(None)


def _made(llm: LLM, name: str, num_tokens: int) -> Drafter:
    return MADE[name].make(num_tokens, llm)


def _native_made(llm: LLM, dtype: torch.dtype, name: str, num_tokens: int) -> Drafter:
    method, _, variant = name.partition(", ")
    if method != "draft_model" or name in TRANSLATED:
        return MADE[name].make(num_tokens, llm)
    context = Context(vocab_size=models_made.VOCAB, num_tokens=num_tokens, dtype=dtype)
    branching = FIXED[:num_tokens] if variant else None
    return DraftModel(_native_draft(dtype).sibling(), context, TreeOptions(branching=branching))


@cache
def _native_draft(dtype: torch.dtype) -> HFModel:
    model = models_made.perturbed(models_made.llama(hidden=64), 0.04).to(dtype)
    return HFModel.adopt(model, "draft", is_fused=True)


SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "draft_model": ("draft_model", {}),
    "draft_model, tree": ("draft_model", {"tree_nodes": 12, "top_k": 3}),
    "ngram": ("ngram", {"prompt_lookup_min": 1}),
    "ngram, branches": ("ngram", {"prompt_lookup_min": 1, "branches": 3}),
    "ngram_lm": ("ngram_lm", {"min_confidence": 0.01}),
    "suffix": ("suffix", {"min_confidence": 0.01}),
    "suffix, store": ("suffix", {"min_confidence": 0.01, "store_tokens": 1024}),
    "lookahead": ("lookahead", {}),
}


@cache
def _seq2seq() -> World:
    """An encoder-decoder in double precision."""
    return World("seq2seq", pairs_made.plain(), _seq2seq_made, tuple(SEQ2SEQ), pairs_made.VOCAB, is_exact=False)


def _seq2seq_made(name: str, num_tokens: int) -> Drafter:
    method, options = SEQ2SEQ[name]
    if method == "draft_model":
        return pairs_made.draft_model(num_tokens, **options)
    module = methods()[method]
    context = Context(vocab_size=pairs_made.VOCAB, num_tokens=num_tokens, dtype=torch.float64)
    made: Drafter = module.create(module.Config(**options), context)
    return made


_MAKERS = {
    "float64": _float64,
    "float32": partial(_native, torch.float32),
    "bfloat16": partial(_native, torch.bfloat16),
    "int8": partial(_native, torch.bfloat16, "int8"),
    "int4": partial(_native, torch.bfloat16, "int4"),
    "seq2seq": _seq2seq,
}
WORLDS = tuple(_MAKERS)
DRAFTERS = {name: tuple(SEQ2SEQ) if name == "seq2seq" else tuple(MADE) for name in WORLDS}
