"""A small configuration of every drafting method, for the invariants that must hold over all of them.

A method declares its configurations itself, as `Method.variants`; `tests/invariants/test_lossless.py` fails if it
declares none.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import pytest
import torch
from transformers import LlamaForCausalLM

from foredraft import LLM, Sampling
from foredraft.drafters.aggressive.copy_cursor import CopyCursor
from foredraft.drafters.aggressive.drafter import AggressiveDrafter
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.ensemble.drafter import EnsembleDrafter
from foredraft.drafters.ensemble.members import EnsembleMember
from foredraft.drafters.interface import Drafter
from foredraft.drafters.method import DrafterContext, Method, Variant
from foredraft.drafters.registry import load_methods
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.request import Request
from foredraft.verification.registry import RULES
from tests.support import tiny_models, tiny_parallel, tiny_vocabularies
from tests.support.devices import TEST_DEVICE
from tests.support.gemma4_assistants import AssistantCase
from tests.support.tiny_heads import HeadCase


class CaseMaker(Protocol):
    """Draft length, and the target to draft for: the tiny one in float64 if none is given."""

    def __call__(self, num_tokens: int, llm: LLM | None = None) -> Drafter: ...


class Preparation(Protocol):
    """Prompts, and the target: the tiny one in float64 if none is given."""

    def __call__(self, prompts: Sequence[Sequence[int]], llm: LLM | None = None) -> None: ...


def _do_nothing(prompts: Sequence[Sequence[int]], llm: LLM | None = None) -> None:
    """Default of `MethodCase.prepare`."""


@dataclass(frozen=True)
class MethodCase:
    """How to make a drafter of one method."""

    make: CaseMaker
    is_chain: bool = True  # `block` verifies it
    # Computes what the drafter needs for these prompts. Otherwise the first proposal does, and may count as slow.
    prepare: Preparation = _do_nothing


def find_device(llm: LLM | None) -> torch.device:
    """Return the device of a target, that of the tests if none is given."""
    return TEST_DEVICE if llm is None else llm.target.device


def _make_plain(method: Method, variant: Variant) -> CaseMaker:
    """Draft with the target, or with a head that is fitted to it first."""
    if variant.training is not None:
        head = HeadCase(method, variant.learning_rate, tuple(variant.training.items()))
        return lambda k, llm=None: head.make_drafter(k, llm, **variant.options(k))

    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        target = (llm or tiny_models.plain()).target
        dtype, device = target.model.dtype, target.device
        context = DrafterContext(tiny_models.VOCAB, target, num_tokens, dtype=dtype, device=device)
        return method.create(method.config(**variant.options(num_tokens)), context)

    return make


def _make_draft_model(method: Method, variant: Variant) -> CaseMaker:
    """Draft with a tiny model, in parallel or of another vocabulary if the variant says so."""

    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        options = dict(variant.options(num_tokens))
        vocab = options.pop("vocab", None)
        if options.pop("parallel", False):
            return tiny_parallel.make_drafter(num_tokens, TreeOptions(**options), find_device(llm))
        if vocab is None:
            return tiny_models.draft_model(num_tokens, options=TreeOptions(**options), device=find_device(llm))
        return tiny_vocabularies.drafter(vocab, num_tokens, TreeOptions(**options), device=find_device(llm))

    return make


@cache
def _edit_output(llm: LLM, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Generate the target's output after a prompt, with some tokens replaced and some left out."""
    room = llm.target.context_length - len(prompt) - 1
    sampling = Sampling(max_tokens=min(60, room), temperature=0, ignore_eos=True)
    tokens = llm.generate([list(prompt)], sampling)[0].token_ids
    return tuple(5 if i % 6 == 4 else token for i, token in enumerate(tokens) if i % 7 != 6)


def _edit_outputs(prompts: Sequence[Sequence[int]], llm: LLM | None = None) -> None:
    """Fill the cache of `_edit_output`."""
    for prompt in prompts:
        _edit_output(llm or tiny_models.plain(), tuple(prompt))


def _make_copying(method: Method, variant: Variant) -> CaseMaker:
    """Draft from a source beside the prompt, or from a prompt that ends with it."""

    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        config = method.config(**variant.options(num_tokens))

        def follow(request: Request) -> CopyCursor:
            prompt = request.spec.prompt
            source = _edit_output(llm or tiny_models.plain(), prompt)
            if config.source == "prompt":
                return CopyCursor.from_unknown_position((*prompt, *source), prompt, config.tokens_per_match)
            return CopyCursor(source, tokens_per_match=config.tokens_per_match)

        return AggressiveDrafter(config, num_tokens, follow)

    return make


def _make_assistant(method: Method, variant: Variant) -> CaseMaker:
    """Draft with an assistant that is fitted to the target first; the variant of that name has ordered embeddings."""
    case = AssistantCase(method, is_ordered=variant.name == "ordered")
    return lambda k, llm=None: case.make_drafter(k, llm, **variant.options(k))


@cache
def perturb_otherwise() -> LlamaForCausalLM:
    return tiny_models.perturb(tiny_models.target(), 0.06, seed=2)


def _make_other_draft_model(num_tokens: int, llm: LLM | None = None) -> Drafter:
    """Draft with a second model, which errs at other tokens."""
    return tiny_models.draft_model(num_tokens, model=perturb_otherwise(), device=find_device(llm))


def _make_ensemble(method: Method, variant: Variant) -> CaseMaker:
    """Other cases together. Its clock counts how often it was looked at, so that every run makes the same choices."""

    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        options = variant.options(num_tokens)
        makers = {name: case.make for name, case in METHOD_CASES.items()} | OTHER_PARTS
        made = {name: makers[name](num_tokens, llm) for name in options["parts"]}
        parts = [
            EnsembleMember(name, drafter, SandboxedDrafter(drafter, tiny_models.VOCAB))
            for name, drafter in made.items()
        ]
        ticks = itertools.count()
        return EnsembleDrafter(parts, options["mode"], " + ".join(made), clock=lambda: 1e-3 * next(ticks))

    return make


OTHER_PARTS: dict[str, CaseMaker] = {
    "draft_model, other weights": _make_other_draft_model
}  # members of ensembles alone
# By `Variant.setup`: what stands beside the target.
SETUPS: dict[str, Callable[[Method, Variant], CaseMaker]] = {
    "": _make_plain,
    "draft model": _make_draft_model,
    "assistant": _make_assistant,
    "edited source": _make_copying,
    "members": _make_ensemble,
}
PREPARATIONS: dict[str, Preparation] = {"edited source": _edit_outputs}


def _list_cases() -> Iterator[tuple[str, MethodCase, Variant]]:
    for name, method in load_methods().items():
        for variant in method.variants:
            make = SETUPS[variant.setup](method, variant)
            prepare = PREPARATIONS.get(variant.setup, _do_nothing)
            title = f"{name}, {variant.name}" if variant.name else name
            yield title, MethodCase(make, variant.is_chain, prepare), variant


METHOD_CASES: dict[str, MethodCase] = {name: case for name, case, _ in _list_cases()}
# Variants with machinery of their own: another memory, another tree, another vocabulary. The other variants differ by
# options. The main invariants run over all of METHOD_CASES, the lesser ones over these. `make soak` runs those over the
# rest.
DISTINCT_CASES = {name for name, _, variant in _list_cases() if variant.has_own_parts}
EACH_CASE = [
    pytest.param(name, marks=() if "," not in name or name in DISTINCT_CASES else pytest.mark.soak)
    for name in METHOD_CASES
]


def pair_cases_with_rules(rules: Sequence[str]) -> list[Any]:
    """Pair EACH_CASE with each rule that takes its drafts: a rule for chains takes no trees."""
    return [
        pytest.param(*case.values, rule, marks=case.marks)
        for case in EACH_CASE
        for rule in rules
        if RULES[rule].takes_trees or METHOD_CASES[case.values[0]].is_chain
    ]


def list_covered_methods() -> set[str]:
    """List the methods that have an entry; an entry is named `method` or `method, variant`."""
    return {name.split(",")[0] for name in METHOD_CASES}


def list_missing_methods() -> set[str]:
    return set(load_methods()) - list_covered_methods()
