"""/tokenize, /detokenize, /tokenizer_info."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foredraft.server.errors import ApiError
from foredraft.server.prompts import check_size, encode_text
from foredraft.server.protocol import DetokenizeRequest, TokenizeRequest
from foredraft.server.service import Service


async def tokenize(service: Service, http: Request, request: TokenizeRequest) -> Response:
    service.check_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    return JSONResponse(await service.off_loop(_tokenize, service, request))


def _tokenize(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    if request.messages is not None:
        check_size(service, sum(len(message.text) for message in request.messages), "messages", is_cut=True)
        has_prompt = request.add_generation_prompt and not request.continue_final_message
        ids = service.templates.encode(request.messages, has_prompt, request.continue_final_message)
    else:
        check_size(service, len(request.prompt or ""), "prompt", is_cut=True)
        ids, _ = encode_text(service, request.prompt or "", request.add_special_tokens)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": service.longest, "tokens": ids}
    if request.return_token_strs:
        found["token_strs"] = [service.vocabulary.spelt(token) for token in ids]
    return found


async def detokenize(service: Service, http: Request, request: DetokenizeRequest) -> Response:
    service.check_name(request.model)
    return JSONResponse({"prompt": await service.off_loop(_detokenize, service, request.tokens)})


def _detokenize(service: Service, ids: list[int]) -> str:
    tokenizer, size = service.vocabulary.need(), service.llm.target.vocab_size
    if len(ids) > service.llm.target.context_length:
        raise ApiError(400, f"tokens may hold at most {service.llm.target.context_length}", "tokens")
    if any(token >= size for token in ids):
        raise ApiError(400, f"tokens holds an id outside the vocabulary of {size} tokens", "tokens")
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def info(service: Service) -> dict[str, Any]:
    """What a client needs to tokenise for us: names of the special tokens, the template, lengths."""
    tokenizer = service.vocabulary.need()
    named = {name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    return {
        **named,
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": service.llm.target.vocab_size,
        "model_max_length": service.llm.target.context_length,
        "chat_template": service.templates.source,
        "added_tokens_decoder": {str(i): token for i, token in service.vocabulary.added.items()},
    }
