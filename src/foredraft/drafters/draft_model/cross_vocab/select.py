"""Selection of the translation between a draft model's vocabulary and the target's: none, TLI or SLEM."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.draft_model.cross_vocab.base import CrossVocabDrafter
from foredraft.drafters.draft_model.cross_vocab.slem import SlemDrafter
from foredraft.drafters.draft_model.cross_vocab.tli import TliDrafter
from foredraft.drafters.draft_model.cross_vocab.vocab_map import VocabMap
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.models.hf import LM
from foredraft.models.vocabularies import find_vocabulary_difference
from foredraft.tokenization.byte_vocabulary import TokenizerVocabulary

log = logging.getLogger(__name__)
AUTO = "auto"
TRANSLATIONS: dict[str, type[CrossVocabDrafter]] = {
    drafter.vocab_option: drafter for drafter in (TliDrafter, SlemDrafter)
}
MIN_AUTO_COVERAGE = 0.7  # share of the sample text's tokens; from here on `auto` selects tli
MIN_COVERAGE = 0.02  # share below which tli is refused
TranslatorFactory = Callable[[LM, DrafterContext, TreeOptions, int | None], CrossVocabDrafter]


class VocabInfo(NamedTuple):
    """Name, tokenizer and vocabulary size of a model."""

    name: str
    tokenizer: Any | None
    vocab_size: int  # width of its logits


def list_vocab_options() -> tuple[str, ...]:
    """List the values of the option `vocab`."""
    return (AUTO, *sorted(TRANSLATIONS))


def check_vocab_option(vocab: str) -> None:
    """Raise ForedraftError for an invalid value of the option `vocab`."""
    if vocab not in list_vocab_options():
        raise ForedraftError(f"unknown vocab {vocab!r}; use one of: {', '.join(list_vocab_options())}")


def select_translation(
    vocab: str, target: VocabInfo, draft: VocabInfo, has_tree: bool = False
) -> TranslatorFactory | None:
    """Select the translation.

    `auto` means none for equal vocabularies, tli if the coverage of the shared tokens is at least MIN_AUTO_COVERAGE
    (MIN_COVERAGE for a tree), and slem otherwise.

    Args:
        vocab: value of the option `vocab`.
        target: vocabulary of the target.
        draft: vocabulary of the draft model.
        has_tree: whether the draft is a tree; slem drafts only chains.

    Returns:
        Function that makes the drafter; None if no translation is needed.

    Raises:
        ForedraftError: if the translation cannot work for this pair.
    """
    mismatch = find_vocabulary_difference(target, draft)
    if vocab == AUTO and mismatch is None:
        return None
    vocab_map = build_vocab_map(target, draft, mismatch)
    chosen = vocab
    if vocab == AUTO:
        chosen = (
            TliDrafter.vocab_option
            if vocab_map.coverage >= (MIN_COVERAGE if has_tree else MIN_AUTO_COVERAGE)
            else SlemDrafter.vocab_option
        )
    _check_coverage(chosen, vocab_map, target, draft)
    if chosen == SlemDrafter.vocab_option and has_tree:
        raise ForedraftError(
            "a draft that is cut into the target's tokens afterwards (vocab slem) is a chain; "
            "leave tree_nodes, top_k and branching out, or give vocab tli (--spec-vocab tli)"
        )
    drafter_class = TRANSLATIONS[chosen]
    log.info(
        "%s drafts for %s by %s: %.0f %% of a text's tokens are shared",
        draft.name,
        target.name,
        chosen,
        100 * vocab_map.coverage,
    )

    def make(lm: LM, context: DrafterContext, options: TreeOptions, kv_tokens: int | None) -> CrossVocabDrafter:
        return drafter_class(lm, context, vocab_map, options, kv_tokens)

    return make


def build_vocab_map(target: VocabInfo, draft: VocabInfo, mismatch: str | None = None) -> VocabMap:
    """Build the map of two vocabularies. Raises ForedraftError if a tokenizer is missing or has no token bytes."""
    for info in (target, draft):
        if info.tokenizer is None:
            reason = f"{mismatch}; {info.name}" if mismatch else info.name
            raise ForedraftError(
                f"{reason} has no tokenizer, and a draft of another vocabulary needs both: put tokenizer.json beside "
                "the weights, or use a draft with the target's tokenizer"
            )
    vocabularies = []
    for info in (target, draft):
        try:
            vocabularies.append(TokenizerVocabulary(info.tokenizer, info.vocab_size))
        except ForedraftError as error:
            raise ForedraftError(f"{info.name}: {error}; use a draft with the target's tokenizer") from None
    return VocabMap(*vocabularies)


def _check_coverage(chosen: str, vocab_map: VocabMap, target: VocabInfo, draft: VocabInfo) -> None:
    if chosen == TliDrafter.vocab_option and vocab_map.coverage < MIN_COVERAGE:
        raise ForedraftError(
            f"{draft.name} and {target.name} share {len(vocab_map.shared_tokens)} tokens, "
            f"{vocab_map.coverage:.1%} of those of a text, which is too little to draft with them alone; use vocab "
            "slem (--spec-vocab slem), or a draft with the target's tokenizer"
        )
    if not vocab_map.is_readable():
        raise ForedraftError(
            f"{draft.name} and {target.name} cannot spell each other's text; use a draft with the target's tokenizer"
        )
