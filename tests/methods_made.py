"""A small configuration of every drafting method, for the laws that must hold over all of them.

A new method adds one entry here; `tests/laws/test_lossless.py` fails until it does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import heads_made
import models_made
import recurrent_made
from foredraft.drafters.base import Context, Drafter, methods


@dataclass(frozen=True)
class Made:
    """How to make a drafter of one method."""

    make: Callable[[int], Drafter]  # draft length -> drafter
    is_chain: bool = True  # `block` verifies it


def _context(num_tokens: int) -> Context:
    return Context(vocab_size=models_made.VOCAB, num_tokens=num_tokens, dtype=torch.float64)


def _created(method: str, num_tokens: int, **options: object) -> Drafter:
    module = methods()[method]
    return module.create(module.Config(**options), _context(num_tokens))


MADE: dict[str, Made] = {
    "draft_model": Made(models_made.draft_model),
    "draft_model, tree": Made(lambda k: models_made.draft_model(k, (3, 2, 1, 1, 2, 1, 1, 1)[:k]), is_chain=False),
    "eagle": Made(recurrent_made.eagle_drafter),
    "eagle, tree": Made(lambda k: recurrent_made.eagle_drafter(k, tree_nodes=3 * k, top_k=3), is_chain=False),
    "eagle, fixed tree": Made(
        lambda k: recurrent_made.eagle_drafter(k, branching=(3, 2, 1, 1, 2, 1, 1, 1)[:k]), is_chain=False
    ),
    "eagle3": Made(recurrent_made.eagle3_drafter),
    "eagle3, tree": Made(lambda k: recurrent_made.eagle3_drafter(k, tree_nodes=3 * k, top_k=3), is_chain=False),
    "eagle3, few tokens": Made(lambda k: recurrent_made.eagle3_drafter(k, draft_vocab_size=60)),
    "medusa": Made(heads_made.medusa_drafter),
    "medusa, tree": Made(lambda k: heads_made.medusa_drafter(k, tree_nodes=3 * k), is_chain=False),
    "mlp_speculator": Made(heads_made.speculator_drafter),
    "mlp_speculator, tree": Made(lambda k: heads_made.speculator_drafter(k, tree_nodes=3 * k), is_chain=False),
    "ngram": Made(lambda k: _created("ngram", k, prompt_lookup_min=1)),
    "ngram, branches": Made(lambda k: _created("ngram", k, prompt_lookup_min=1, branches=3), is_chain=False),
    "ngram_lm": Made(lambda k: _created("ngram_lm", k, min_confidence=0.01)),
}


def covered() -> set[str]:
    """The methods that have an entry; an entry is named `method` or `method, variant`."""
    return {name.split(",")[0] for name in MADE}


def missing() -> set[str]:
    return set(methods()) - covered()
