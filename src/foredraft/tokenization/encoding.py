"""Conversion of text to token ids, with panics of native tokenizers turned into ForedraftError."""

from typing import Any

from foredraft.errors import ForedraftError, is_panic


def encode(
    tokenizer: Any,
    text: str | list[str],
    add_special_tokens: bool = True,
    return_offsets: bool = False,
    is_target: bool = False,
) -> Any:
    """Encode one text or several.

    Args:
        tokenizer: transformers tokenizer.
        text: one string or a list of strings.
        add_special_tokens: whether to add the tokenizer's control tokens. Default True.
        return_offsets: whether to return the character offsets of every token. Default False.
        is_target: whether the text is the output of an encoder-decoder model; some tokenizers mark its language.
            Default False.

    Returns:
        The encoding of the tokenizer.

    Raises:
        ForedraftError: the tokenizer cannot encode the text. Its native code may panic, for example at a limit of its
            regular expressions; Python sees a BaseException.
    """
    options: dict[str, bool] = {} if add_special_tokens else {"add_special_tokens": False}
    if return_offsets:
        options["return_offsets_mapping"] = True
    try:
        return tokenizer(text_target=text, **options) if is_target else tokenizer(text, **options)
    except BaseException as error:
        if type(error) is Exception or is_panic(error):  # native tokenizers raise the bare type Exception
            raise ForedraftError(
                "the tokenizer cannot read this text; change or shorten it, or give token ids"
            ) from error
        raise
