"""The prompts of a completion request as token ids, with what an echo needs of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foredraft.models.tokenizing import encode
from foredraft.server.errors import ApiError
from foredraft.server.protocol import CompletionRequest

if TYPE_CHECKING:
    from foredraft.server.service import Service


@dataclass(frozen=True)
class Encoded:
    """One prompt. `offsets`: where each token's text begins in `text`."""

    ids: list[int]
    text: str = ""
    offsets: tuple[int, ...] = ()


def encode_prompts(service: "Service", request: CompletionRequest) -> list[Encoded]:
    """Raises ApiError for a prompt that cannot be read or is far too long."""
    prompt = request.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompts: list[Any] = [prompt]
    else:
        prompts = list(prompt)
    return [_encoded(service, request, one) for one in prompts]


def _encoded(service: "Service", request: CompletionRequest, prompt: str | list[int]) -> Encoded:
    most = request.truncate_prompt_tokens
    offsets: list[int] | None = None
    if isinstance(prompt, str):
        check_size(service, len(prompt), "prompt", is_cut=most is not None)
        text, (ids, offsets) = prompt, encode_text(service, prompt, request.add_special_tokens, request.echo)
    else:
        ids, text = list(prompt), ""
        size = service.llm.target.vocab_size  # once: a look at the model costs more than a token
        if ids and not 0 <= min(ids) <= max(ids) < size:
            raise ApiError(400, f"a prompt token id is outside the vocabulary of {size} tokens", "prompt")
    if most is not None and len(ids) > most:
        ids, offsets = ids[-most:], None
    if not ids:
        raise ApiError(400, "the prompt is empty; give at least one token", "prompt")
    service.check_length(len(ids))
    if not request.echo:
        return Encoded(ids)
    if offsets is None:
        pieces = service.vocabulary.pieces(ids)
        text, ends = "".join(pieces), [0]
        for piece in pieces:
            ends.append(ends[-1] + len(piece))
        offsets = ends[:-1]
    return Encoded(ids, text, tuple(offsets))


def encode_text(
    service: "Service", text: str, has_special: bool | None = None, has_offsets: bool = False
) -> tuple[list[int], list[int] | None]:
    """Token ids of a text, and where each begins in it if that is wanted and the tokenizer can tell."""
    tokenizer = service.vocabulary.need()
    is_fast = has_offsets and getattr(tokenizer, "is_fast", False)
    encoded = encode(tokenizer, text, has_special is not False, is_fast)
    offsets = [start for start, _ in encoded["offset_mapping"]] if is_fast else None
    return list(encoded.input_ids), offsets


def check_size(service: "Service", size: int, param: str, is_cut: bool = False) -> None:
    """Raises ApiError for a text of this many characters that cannot fit, before the long way of tokenising it.
    is_cut: it need not fit, as its tokens are only counted or cut; then it is bounded by the limit on texts."""
    target = service.llm.target
    most = (target.source_length or target.context_length) * service.vocabulary.longest
    if is_cut:
        most = max(most, service.settings.limits.text)
    if size > most:
        raise ApiError(400, f"{param}: {size} characters are too many, at most {most} are taken", param)
