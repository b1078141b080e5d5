"""Comparison of the vocabularies of two models."""

from typing import Any

from foredraft.errors import ForedraftError


def check_vocabularies(target: tuple[str, Any | None, int], draft: tuple[str, Any | None, int]) -> None:
    """Refuse a draft model with another vocabulary than the target's.

    Args:
        target: name, tokenizer or None, and number of tokens of the logits.
        draft: likewise for the draft model.

    Raises:
        ForedraftError: the vocabularies differ; the message has the lowest token id that differs.
    """
    difference = find_vocabulary_difference(target, draft)
    if difference is not None:
        raise ForedraftError(f"{difference}; use a draft with the target's tokenizer")


def find_vocabulary_difference(target: tuple[str, Any | None, int], draft: tuple[str, Any | None, int]) -> str | None:
    """Describe the difference of two vocabularies.

    Vocabularies with the same tokens are equal even if they are padded to different sizes. Without both tokenizers
    only the sizes are compared.

    Args:
        target: name, tokenizer or None, and number of tokens of the logits.
        draft: likewise for the draft model.

    Returns:
        The first difference by token id, or None.
    """
    (target_name, target_tok, target_size), (draft_name, draft_tok, draft_size) = target, draft
    if target_tok is None or draft_tok is None:
        if target_size == draft_size:
            return None
        return (
            f"{draft_name} has {draft_size} tokens and {target_name} {target_size}, and without both tokenizers "
            "they cannot be compared"
        )
    target_tokens = {i: token for token, i in target_tok.get_vocab().items() if i < target_size}
    draft_tokens = {i: token for token, i in draft_tok.get_vocab().items() if i < draft_size}
    for i in sorted(target_tokens.keys() | draft_tokens.keys()):
        if target_tokens.get(i) != draft_tokens.get(i):
            return (
                f"{draft_name} does not share the vocabulary of {target_name}: token {i} is "
                f"{_format_token(draft_tokens, i)} in the draft and {_format_token(target_tokens, i)} in the target"
            )
    return None


def _format_token(vocabulary: dict[int, str], i: int) -> str:
    return repr(vocabulary[i]) if i in vocabulary else "missing"
