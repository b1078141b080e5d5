"""Tokenization of the prompts of a completion request, with text and offsets for `echo`."""

from dataclasses import dataclass
from typing import Any

from foredraft.server.content_parts import join_text
from foredraft.server.errors import ApiError
from foredraft.server.infill import InfillTokens
from foredraft.server.schemas import CompletionRequest, GenerationRequest
from foredraft.server.service import Service
from foredraft.tokenization.encoding import encode


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of one prompt. `text` and `offsets` are set only for `echo`."""

    ids: list[int]
    text: str = ""
    offsets: tuple[int, ...] = ()  # offset of each token's text in `text`


def encode_prompts(service: Service, request: CompletionRequest) -> list[EncodedPrompt]:
    """Tokenize the prompts of a request. Raises ApiError for a prompt that is invalid, empty or too long."""
    prompt = request.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompts: list[Any] = [prompt]
    else:
        prompts = list(prompt)
    if request.suffix:
        tokens = InfillTokens.find(service.vocabulary)
        return [_encode_infill(service, request, each, tokens) for each in prompts]
    return [_encode_prompt(service, request, each) for each in prompts]


def _encode_infill(
    service: Service, request: CompletionRequest, prompt: str | list[int], tokens: InfillTokens
) -> EncodedPrompt:
    """Tokenize a prompt with its suffix. `echo` shows the prompt alone."""
    suffix = request.suffix or ""
    check_text_size(service, len(suffix), "suffix")
    if isinstance(prompt, str):
        check_text_size(service, len(prompt), "prompt")
    else:
        _check_ids(service, prompt)
    ids = tokens.encode(service.vocabulary, prompt, suffix, request.add_special_tokens is not False)
    service.check_length(len(ids))
    if not request.echo:
        return EncodedPrompt(ids)
    return EncodedPrompt(
        ids,
        prompt
        if isinstance(prompt, str)
        else service.vocabulary.decode(prompt, request.skip_special_tokens is not False),
    )


def _check_ids(service: Service, ids: list[int]) -> None:
    size = service.llm.target.vocab_size  # read once: the property takes longer than checking a token
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise ApiError(400, f"a prompt token id is outside the vocabulary of {size} tokens", "prompt")


def _encode_prompt(service: Service, request: CompletionRequest, prompt: str | list[int]) -> EncodedPrompt:
    max_tokens = request.truncate_prompt_tokens
    offsets: list[int] | None = None
    if isinstance(prompt, str):
        check_text_size(service, len(prompt), "prompt", is_truncated=max_tokens is not None)
        text, (ids, offsets) = prompt, encode_text(service, prompt, request.add_special_tokens, request.echo)
    else:
        ids, text = list(prompt), ""
        _check_ids(service, ids)
    if max_tokens is not None and len(ids) > max_tokens:
        ids, offsets = ids[-max_tokens:], None
    if not ids:
        raise ApiError(400, "the prompt is empty; give at least one token", "prompt")
    service.check_length(len(ids))
    if not request.echo:
        return EncodedPrompt(ids)
    if offsets is None:
        pieces = service.vocabulary.decode_pieces(ids, request.skip_special_tokens is not False)
        text, ends = "".join(pieces), [0]
        for piece in pieces:
            ends.append(ends[-1] + len(piece))
        offsets = ends[:-1]
    return EncodedPrompt(ids, text, tuple(offsets))


def encode_text(
    service: Service, text: str, has_special: bool | None = None, has_offsets: bool = False
) -> tuple[list[int], list[int] | None]:
    """Tokenize a text.

    Args:
        service: state of all routes, with the tokenizer.
        text: text to tokenize.
        has_special: add the tokenizer's special tokens. None = True.
        has_offsets: also return the offset of each token.

    Returns:
        (token ids, offsets); offsets are None if they were not requested or the tokenizer does not report them.
    """
    tokenizer = service.vocabulary.require_tokenizer()
    is_fast = has_offsets and getattr(tokenizer, "is_fast", False)
    encoded = encode(tokenizer, text, has_special is not False, is_fast)
    offsets = [start for start, _ in encoded["offset_mapping"]] if is_fast else None
    return list(encoded.input_ids), offsets


def check_text_size(service: Service, size: int, param: str, is_truncated: bool = False) -> None:
    """Raise ApiError for a text that cannot fit in the context, without tokenizing it.

    Args:
        service: state of all routes, with the model.
        size: characters of the text.
        param: field that holds it.
        is_truncated: its tokens are only counted, or truncated, so that it may have up to max_text_chars.
    """
    target = service.llm.target
    max_chars = (target.source_length or target.context_length) * service.vocabulary.max_token_chars
    if is_truncated:
        max_chars = max(max_chars, service.settings.limits.max_text_chars)
    if size > max_chars:
        raise ApiError(400, f"{param}: {size} characters are too many, at most {max_chars} are allowed", param)


def encode_prediction(service: Service, request: GenerationRequest) -> tuple[int, ...]:
    """Tokenize the request's prediction; () if it has none."""
    if request.prediction is None:
        return ()
    text = join_text(request.prediction.content)
    check_text_size(service, len(text), "prediction")
    return tuple(encode_text(service, text, has_special=False)[0]) if text else ()
