"""A small configuration of every drafting method, for the laws that must hold over all of them.

A new method adds one entry here; `tests/laws/test_lossless.py` fails until it does.
"""

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import pytest
import torch

import heads_made
import models_made
import vocab_made
from foredraft import LLM, Sampling
from foredraft.drafters import aggressive
from foredraft.drafters.base import Context, Drafter, methods
from foredraft.drafters.choice import Mode
from foredraft.drafters.composed import Composed
from foredraft.drafters.follower import Follower
from foredraft.drafters.growth import TreeOptions
from foredraft.drafters.parts import Part
from foredraft.engine.guard import Guard
from foredraft.request import Request
from heads_made import Head


class Make(Protocol):
    """Draft length, and the target to draft for: the tiny one in float64 if none is given."""

    def __call__(self, num_tokens: int, llm: LLM | None = None) -> Drafter: ...


@dataclass(frozen=True)
class Made:
    """How to make a drafter of one method."""

    make: Make
    is_chain: bool = True  # `block` verifies it


FIXED = (3, 2, 1, 1, 2, 1, 1, 1)  # children by depth


def _draft_model(num_tokens: int, llm: LLM | None = None) -> Drafter:
    return models_made.draft_model(num_tokens)


def _draft_tree(num_tokens: int, llm: LLM | None = None) -> Drafter:
    return models_made.draft_model(num_tokens, FIXED[:num_tokens])


def _translated(vocab: str, **options: Any) -> Make:
    """A draft of another vocabulary."""

    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        return vocab_made.drafter(vocab, num_tokens, TreeOptions(**options))

    return make


def _created(method: str, **options: object) -> Make:
    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        module = methods()[method]
        context = Context(vocab_size=models_made.VOCAB, num_tokens=num_tokens, dtype=torch.float64)
        return module.create(module.Config(**options), context)

    return make


def _early_exit(**options: object) -> Make:
    """With the target's own layers and nothing else."""

    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        target = (llm or models_made.plain()).target
        module = methods()["early_exit"]
        context = Context(models_made.VOCAB, target, num_tokens, dtype=target.model.dtype)
        return module.create(module.Config(**options), context)

    return make


@cache
def _edited(llm: LLM, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What the target says after a prompt, with tokens exchanged and left out."""
    room = llm.target.context_length - len(prompt) - 1
    sampling = Sampling(max_tokens=min(60, room), temperature=0, ignore_eos=True)
    tokens = llm.generate([list(prompt)], sampling)[0].token_ids
    return tuple(5 if i % 6 == 4 else token for i, token in enumerate(tokens) if i % 7 != 6)


def _copying(**options: object) -> Make:
    """From a source beside the prompt, or from a prompt that has it behind it."""

    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        config = aggressive.Config(**options)  # type: ignore[arg-type]

        def follow(request: Request) -> Follower:
            source = _edited(llm or models_made.plain(), tuple(request.prompt))
            if config.source == "prompt":
                return Follower.lost((*request.prompt, *source), request.prompt, config.tokens_per_match)
            return Follower(source, per_match=config.tokens_per_match)

        return aggressive.Aggressive(config, num_tokens, follow)

    return make


def _tree(head: Head, **options: object) -> Made:
    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        return head.drafter(num_tokens, llm, tree_nodes=3 * num_tokens, **options)

    return Made(make, is_chain=False)


def _fixed_tree(head: Head) -> Made:
    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        return head.drafter(num_tokens, llm, branching=FIXED[:num_tokens])

    return Made(make, is_chain=False)


def _composed(mode: Mode, *names: str, is_chain: bool = True) -> Made:
    """Other entries together. Its clock counts how often it was looked at, so that every run makes the same choices."""

    def make(num_tokens: int, llm: LLM | None = None) -> Drafter:
        made = {name: MADE[name].make(num_tokens, llm) for name in names}
        parts = [Part(name, drafter, Guard(drafter, models_made.VOCAB)) for name, drafter in made.items()]
        ticks = itertools.count()
        return Composed(parts, mode, " + ".join(names), clock=lambda: 1e-3 * next(ticks))

    return Made(make, is_chain)


MADE: dict[str, Made] = {
    "compose": _composed("auto", "ngram", "draft_model"),
    "compose, merged": _composed("merge", "suffix", "eagle3"),
    "compose, merged trees": _composed("merge", "ngram, branches", "medusa, tree", is_chain=False),
    "compose, two memories": _composed("merge", "eagle", "draft_model"),
    "compose, sequence": _composed("sequence", "ngram_lm", "mlp_speculator"),
    "blockwise": Made(heads_made.BLOCKWISE.drafter),
    "chimera": Made(heads_made.CHIMERA.drafter),
    "chimera, tree": _tree(heads_made.CHIMERA, top_k=3),
    "chimera, fixed tree": _fixed_tree(heads_made.CHIMERA),
    "chimera, one tap": Made(heads_made.CHIMERA_ONE_TAP.drafter),
    "aggressive": Made(_copying()),
    "aggressive, branches": Made(_copying(branches=3, tokens_per_match=2), is_chain=False),
    "aggressive, prompt": Made(_copying(source="prompt")),
    "draft_model": Made(_draft_model),
    "draft_model, tree": Made(_draft_tree, is_chain=False),
    "draft_model, slem": Made(_translated("slem")),
    "draft_model, tli": Made(_translated("tli")),
    "draft_model, tli tree": Made(_translated("tli", tree_nodes=8, top_k=3), is_chain=False),
    "eagle": Made(heads_made.EAGLE.drafter),
    "eagle, tree": _tree(heads_made.EAGLE, top_k=3),
    "eagle, fixed tree": _fixed_tree(heads_made.EAGLE),
    "eagle3": Made(heads_made.EAGLE3.drafter),
    "eagle3, tree": _tree(heads_made.EAGLE3, top_k=3),
    "eagle3, few tokens": Made(heads_made.EAGLE3_FEW.drafter),
    "early_exit": Made(_early_exit()),
    "early_exit, tree": Made(_early_exit(tree_nodes=12, top_k=3), is_chain=False),
    "early_exit, adapter": Made(heads_made.EARLY_EXIT.drafter),
    "lookahead": Made(_created("lookahead"), is_chain=False),
    "lookahead, window alone": Made(_created("lookahead", ngram_size=3, from_text=False), is_chain=False),
    "hydra": Made(heads_made.HYDRA.drafter),
    "hydra, tree": _tree(heads_made.HYDRA, top_k=3),
    "hydra, lean tree": _tree(heads_made.HYDRA_LEAN),
    "hydra, prefix": Made(heads_made.HYDRA_PREFIX.drafter),
    "hydra, prefix tree": _tree(heads_made.HYDRA_PREFIX, top_k=3),
    "medusa": Made(heads_made.MEDUSA.drafter),
    "medusa, tree": _tree(heads_made.MEDUSA),
    "mlp_speculator": Made(heads_made.SPECULATOR.drafter),
    "mlp_speculator, tree": _tree(heads_made.SPECULATOR),
    "ngram": Made(_created("ngram", prompt_lookup_min=1)),
    "ngram, branches": Made(_created("ngram", prompt_lookup_min=1, branches=3), is_chain=False),
    "ngram_lm": Made(_created("ngram_lm", min_confidence=0.01)),
    "suffix": Made(_created("suffix", min_confidence=0.01)),
    "suffix, store": Made(_created("suffix", min_confidence=0.01, store_tokens=1024)),
    "suffix, tree": Made(_created("suffix", min_confidence=0.01, tree_nodes=12, top_k=3), is_chain=False),
}


# Variants with machinery of their own: another memory, another tree, another vocabulary. The other variants differ by
# options; the main laws run over all of MADE, the lesser ones over these, and `make soak` runs those over the rest.
APART = {
    "chimera, tree", "compose, merged trees", "compose, two memories", "draft_model, slem", "draft_model, tli",
    "draft_model, tree", "eagle, tree", "eagle3, few tokens", "early_exit, tree", "hydra, prefix tree", "suffix, store",
}  # fmt: skip
EACH = [pytest.param(name, marks=() if "," not in name or name in APART else pytest.mark.soak) for name in MADE]


def covered() -> set[str]:
    """The methods that have an entry; an entry is named `method` or `method, variant`."""
    return {name.split(",")[0] for name in MADE}


def missing() -> set[str]:
    return set(methods()) - covered()
