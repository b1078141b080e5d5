"""A small configuration of every drafting method, for the invariants that must hold over all of them.

A new method adds one entry here; `tests/invariants/test_lossless.py` fails until it does.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import pytest
import torch

from foredraft import LLM, Sampling
from foredraft.drafters.aggressive import drafter as aggressive
from foredraft.drafters.aggressive.copy_cursor import CopyCursor
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.ensemble.drafter import EnsembleDrafter
from foredraft.drafters.ensemble.members import EnsembleMember
from foredraft.drafters.ensemble.selector import SelectionMode
from foredraft.drafters.interface import Drafter
from foredraft.drafters.registry import DrafterContext, load_methods
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.request import Request
from foredraft.verification.registry import RULES
from tests.support import tiny_heads, tiny_models, tiny_vocabularies
from tests.support.tiny_heads import HeadCase


class CaseMaker(Protocol):
    """Draft length, and the target to draft for: the tiny one in float64 if none is given."""

    def __call__(self, num_tokens: int, llm: LLM | None = None) -> Drafter: ...


@dataclass(frozen=True)
class MethodCase:
    """How to make a drafter of one method."""

    make: CaseMaker
    is_chain: bool = True  # `block` verifies it


FIXED_BRANCHING = (3, 2, 1, 1, 2, 1, 1, 1)  # children by depth


def _make_draft_model(num_tokens: int, llm: LLM | None = None) -> Drafter:
    return tiny_models.draft_model(num_tokens)


def _make_draft_tree(num_tokens: int, llm: LLM | None = None) -> Drafter:
    return tiny_models.draft_model(num_tokens, FIXED_BRANCHING[:num_tokens])


def _make_cross_vocab_maker(vocab: str, **options: Any) -> CaseMaker:
    """Make a draft of another vocabulary."""

    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        return tiny_vocabularies.drafter(vocab, num_tokens, TreeOptions(**options))

    return make


def _make_method_maker(method: str, **options: object) -> CaseMaker:
    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        module = load_methods()[method]
        context = DrafterContext(vocab_size=tiny_models.VOCAB, num_speculative_tokens=num_tokens, dtype=torch.float64)
        return module.create(module.Config(**options), context)

    return make


def _make_early_exit_maker(**options: object) -> CaseMaker:
    """Draft with the target's own layers and nothing else."""

    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        target = (llm or tiny_models.plain()).target
        module = load_methods()["early_exit"]
        context = DrafterContext(tiny_models.VOCAB, target, num_tokens, dtype=target.model.dtype)
        return module.create(module.Config(**options), context)

    return make


@cache
def _edit_output(llm: LLM, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Generate the target's output after a prompt, with some tokens replaced and some left out."""
    room = llm.target.context_length - len(prompt) - 1
    sampling = Sampling(max_tokens=min(60, room), temperature=0, ignore_eos=True)
    tokens = llm.generate([list(prompt)], sampling)[0].token_ids
    return tuple(5 if i % 6 == 4 else token for i, token in enumerate(tokens) if i % 7 != 6)


def _make_aggressive_maker(**options: object) -> CaseMaker:
    """Draft from a source beside the prompt, or from a prompt that ends with it."""

    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        config = aggressive.Config(**options)  # type: ignore[arg-type]

        def follow(request: Request) -> CopyCursor:
            source = _edit_output(llm or tiny_models.plain(), tuple(request.prompt))
            if config.source == "prompt":
                return CopyCursor.from_unknown_position(
                    (*request.prompt, *source), request.prompt, config.tokens_per_match
                )
            return CopyCursor(source, tokens_per_match=config.tokens_per_match)

        return aggressive.AggressiveDrafter(config, num_tokens, follow)

    return make


def _make_tree_case(head: HeadCase, **options: object) -> MethodCase:
    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        return head.make_drafter(num_tokens, llm, tree_nodes=3 * num_tokens, **options)

    return MethodCase(make, is_chain=False)


def _make_fixed_tree_case(head: HeadCase) -> MethodCase:
    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        return head.make_drafter(num_tokens, llm, branching=FIXED_BRANCHING[:num_tokens])

    return MethodCase(make, is_chain=False)


def _make_ensemble_case(mode: SelectionMode, *names: str, is_chain: bool = True) -> MethodCase:
    """Other entries together. Its clock counts how often it was looked at, so that every run makes the same choices."""

    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        made = {name: METHOD_CASES[name].make(num_tokens, llm) for name in names}
        parts = [
            EnsembleMember(name, drafter, SandboxedDrafter(drafter, tiny_models.VOCAB))
            for name, drafter in made.items()
        ]
        ticks = itertools.count()
        return EnsembleDrafter(parts, mode, " + ".join(names), clock=lambda: 1e-3 * next(ticks))

    return MethodCase(make, is_chain)


METHOD_CASES: dict[str, MethodCase] = {
    "compose": _make_ensemble_case("auto", "ngram", "draft_model"),
    "compose, merged": _make_ensemble_case("merge", "suffix", "eagle3"),
    "compose, merged trees": _make_ensemble_case("merge", "ngram, branches", "medusa, tree", is_chain=False),
    "compose, two memories": _make_ensemble_case("merge", "eagle", "draft_model"),
    "compose, sequence": _make_ensemble_case("sequence", "ngram_lm", "mlp_speculator"),
    "blockwise": MethodCase(tiny_heads.BLOCKWISE.make_drafter),
    "chimera": MethodCase(tiny_heads.CHIMERA.make_drafter),
    "chimera, tree": _make_tree_case(tiny_heads.CHIMERA, top_k=3),
    "chimera, fixed tree": _make_fixed_tree_case(tiny_heads.CHIMERA),
    "chimera, one tap": MethodCase(tiny_heads.CHIMERA_ONE_TAP.make_drafter),
    "aggressive": MethodCase(_make_aggressive_maker()),
    "aggressive, branches": MethodCase(_make_aggressive_maker(branches=3, tokens_per_match=2), is_chain=False),
    "aggressive, prompt": MethodCase(_make_aggressive_maker(source="prompt")),
    "draft_model": MethodCase(_make_draft_model),
    "draft_model, tree": MethodCase(_make_draft_tree, is_chain=False),
    "draft_model, slem": MethodCase(_make_cross_vocab_maker("slem")),
    "draft_model, tli": MethodCase(_make_cross_vocab_maker("tli")),
    "draft_model, tli tree": MethodCase(_make_cross_vocab_maker("tli", tree_nodes=8, top_k=3), is_chain=False),
    "eagle": MethodCase(tiny_heads.EAGLE.make_drafter),
    "eagle, tree": _make_tree_case(tiny_heads.EAGLE, top_k=3),
    "eagle, fixed tree": _make_fixed_tree_case(tiny_heads.EAGLE),
    "eagle3": MethodCase(tiny_heads.EAGLE3.make_drafter),
    "eagle3, tree": _make_tree_case(tiny_heads.EAGLE3, top_k=3),
    "eagle3, few tokens": MethodCase(tiny_heads.EAGLE3_FEW.make_drafter),
    "early_exit": MethodCase(_make_early_exit_maker()),
    "early_exit, tree": MethodCase(_make_early_exit_maker(tree_nodes=12, top_k=3), is_chain=False),
    "early_exit, adapter": MethodCase(tiny_heads.EARLY_EXIT.make_drafter),
    "lookahead": MethodCase(_make_method_maker("lookahead"), is_chain=False),
    "lookahead, window alone": MethodCase(
        _make_method_maker("lookahead", ngram_size=3, from_text=False), is_chain=False
    ),
    "hydra": MethodCase(tiny_heads.HYDRA.make_drafter),
    "hydra, tree": _make_tree_case(tiny_heads.HYDRA, top_k=3),
    "hydra, lean tree": _make_tree_case(tiny_heads.HYDRA_LEAN),
    "hydra, prefix": MethodCase(tiny_heads.HYDRA_PREFIX.make_drafter),
    "hydra, prefix tree": _make_tree_case(tiny_heads.HYDRA_PREFIX, top_k=3),
    "medusa": MethodCase(tiny_heads.MEDUSA.make_drafter),
    "medusa, tree": _make_tree_case(tiny_heads.MEDUSA),
    "mlp_speculator": MethodCase(tiny_heads.SPECULATOR.make_drafter),
    "mlp_speculator, tree": _make_tree_case(tiny_heads.SPECULATOR),
    "ngram": MethodCase(_make_method_maker("ngram", prompt_lookup_min=1)),
    "ngram, branches": MethodCase(_make_method_maker("ngram", prompt_lookup_min=1, branches=3), is_chain=False),
    "ngram_lm": MethodCase(_make_method_maker("ngram_lm", min_confidence=0.01)),
    "suffix": MethodCase(_make_method_maker("suffix", min_confidence=0.01)),
    "suffix, store": MethodCase(_make_method_maker("suffix", min_confidence=0.01, store_tokens=1024)),
    "suffix, tree": MethodCase(
        _make_method_maker("suffix", min_confidence=0.01, tree_nodes=12, top_k=3), is_chain=False
    ),
}


# Variants with machinery of their own: another memory, another tree, another vocabulary. The other variants differ by
# options. The main invariants run over all of MADE, the lesser ones over these. `make soak` runs those over the rest.
DISTINCT_CASES = {
    "chimera, tree", "compose, merged trees", "compose, two memories", "draft_model, slem", "draft_model, tli",
    "draft_model, tree", "eagle, tree", "eagle3, few tokens", "early_exit, tree", "hydra, prefix tree", "suffix, store",
}  # fmt: skip
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
