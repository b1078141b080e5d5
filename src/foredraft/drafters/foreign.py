"""Which way a draft model takes whose vocabulary is not the target's."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from foredraft.drafters.base import Context
from foredraft.drafters.growth import TreeOptions
from foredraft.drafters.intersection import Pair
from foredraft.drafters.slem import Retokenising
from foredraft.drafters.tli import Intersecting
from foredraft.drafters.translated import Translated
from foredraft.drafters.vocabularies import TokenizerVocabulary
from foredraft.errors import ForedraftError
from foredraft.models.lm import LM
from foredraft.models.load import difference

log = logging.getLogger(__name__)
AUTO = "auto"
WAYS: dict[str, type[Translated]] = {way.vocab: way for way in (Intersecting, Retokenising)}
ENOUGH = 0.7  # share of a text's tokens that must be shared for `auto` to draft with those alone
LEAST = 0.02  # below that, drafting with shared tokens is of no use
Make = Callable[[LM, Context, TreeOptions, int | None], Translated]


class Side(NamedTuple):
    """A model, as far as its vocabulary goes."""

    name: str
    tokenizer: Any | None
    size: int  # width of its logits


def words() -> tuple[str, ...]:
    """What the option takes."""
    return (AUTO, *sorted(WAYS))


def check_word(vocab: str) -> None:
    """Raise ForedraftError for a word that the option does not take."""
    if vocab not in words():
        raise ForedraftError(f"unknown vocab {vocab!r}; use one of: {', '.join(words())}")


def way(vocab: str, target: Side, draft: Side, has_tree: bool = False) -> Make | None:
    """How to make the drafter; None: the vocabularies are the same, so that nothing needs translating.

    `auto` is None for equal vocabularies, tli where the shared tokens make up ENOUGH of a text (or a tree is wanted),
    and slem otherwise. Raises ForedraftError where that cannot work, a tree by slem included.
    """
    differs = difference(target, draft)
    if vocab == AUTO and differs is None:
        return None
    pair = pair_of(target, draft, differs)
    chosen = vocab
    if vocab == AUTO:
        chosen = Intersecting.vocab if pair.coverage >= (LEAST if has_tree else ENOUGH) else Retokenising.vocab
    _check(chosen, pair, target, draft)
    if chosen == Retokenising.vocab and has_tree:
        raise ForedraftError(
            "a draft that is cut into the target's tokens afterwards (vocab slem) is a chain; "
            "leave tree_nodes, top_k and branching out, or give vocab tli (--spec-vocab tli)"
        )
    made = WAYS[chosen]
    log.info(
        "%s drafts for %s by %s: %.0f %% of a text's tokens are shared",
        draft.name,
        target.name,
        chosen,
        100 * pair.coverage,
    )

    def make(lm: LM, context: Context, options: TreeOptions, kv_tokens: int | None) -> Translated:
        return made(lm, context, pair, options, kv_tokens)

    return make


def pair_of(target: Side, draft: Side, differs: str | None = None) -> Pair:
    """Raises ForedraftError where one of them has no tokenizer, or one whose tokens stand for no text."""
    for side in (target, draft):
        if side.tokenizer is None:
            why = f"{differs}; {side.name}" if differs else side.name
            raise ForedraftError(
                f"{why} has no tokenizer, and a draft of another vocabulary needs both: put tokenizer.json beside the "
                "weights, or use a draft with the target's tokenizer"
            )
    sides = []
    for side in (target, draft):
        try:
            sides.append(TokenizerVocabulary(side.tokenizer, side.size))
        except ForedraftError as error:
            raise ForedraftError(f"{side.name}: {error}; use a draft with the target's tokenizer") from None
    return Pair(*sides)


def _check(chosen: str, pair: Pair, target: Side, draft: Side) -> None:
    if chosen == Intersecting.vocab and pair.coverage < LEAST:
        raise ForedraftError(
            f"{draft.name} and {target.name} share {len(pair.shared)} tokens, {pair.coverage:.1%} of those of a text, "
            "which is too little to draft with them alone; use vocab slem (--spec-vocab slem), or a draft with the "
            "target's tokenizer"
        )
    if not pair.is_readable():
        raise ForedraftError(
            f"{draft.name} and {target.name} cannot spell each other's text; use a draft with the target's tokenizer"
        )
