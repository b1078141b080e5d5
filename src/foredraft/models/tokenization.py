"""Text to token ids, and errors of tokenizers that are none of ours."""

from typing import Any

from foredraft.errors import ForedraftError, is_panic


def encode(tokenizer: Any, text: str | list[str], add_special_tokens: bool = True, return_offsets: bool = False) -> Any:
    """Encode one text or several.

    has_special: with the control tokens it puts around a text. has_offsets: with where each token begins.
    Raises ForedraftError if the tokenizer cannot read the text: its native code may panic, by a limit of its patterns
    for one, which Python sees as a BaseException.
    """
    options: dict[str, bool] = {} if add_special_tokens else {"add_special_tokens": False}
    if return_offsets:
        options["return_offsets_mapping"] = True
    try:
        return tokenizer(text, **options)
    except BaseException as error:
        if type(error) is Exception or is_panic(error):  # the first is how a tokenizer's native code raises
            raise ForedraftError(
                "the tokenizer cannot read this text; change or shorten it, or give token ids"
            ) from error
        raise
