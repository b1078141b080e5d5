"""Handlers of /tokenize, /detokenize and /tokenizer_info."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foredraft.server.errors import ApiError
from foredraft.server.prompts import check_text_size, encode_text
from foredraft.server.request_images import place_images
from foredraft.server.schemas import DetokenizeRequest, TokenizeRequest, list_image_urls
from foredraft.server.service import Service
from foredraft.server.template_rows import ChatInput
from foredraft.server.tool_request import check_results, check_variables, read_tools


async def tokenize(service: Service, http: Request, request: TokenizeRequest) -> Response:
    """Serve POST /tokenize. Raises ApiError."""
    service.check_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    for name in ("tools", "chat_template_kwargs"):
        if request.prompt is not None and getattr(request, name):
            raise ApiError(400, f"{name} goes with messages; leave it out", name)
    body = await service.run_off_loop(_tokenize_request, service, request, has_images=request.has_images)
    return JSONResponse(body)


def _tokenize_request(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    if request.messages is not None:
        check_results(request.messages)
        check_text_size(service, sum(message.size for message in request.messages), "messages", is_truncated=True)
        chat = ChatInput(
            request.messages,
            read_tools(request.tools or []),
            check_variables(request.chat_template_kwargs, service.chat_template),
            request.add_generation_prompt and not request.continue_final_message,
            request.continue_final_message,
        )
        ids, _ = place_images(service, service.chat_template.encode_chat(chat).ids, list_image_urls(request.messages))
    else:
        check_text_size(service, len(request.prompt or ""), "prompt", is_truncated=True)
        ids, _ = encode_text(service, request.prompt or "", request.add_special_tokens)
    body: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_length, "tokens": ids}
    if request.return_token_strs:
        body["token_strs"] = [service.vocabulary.format_token(token) for token in ids]
    return body


async def detokenize(service: Service, http: Request, request: DetokenizeRequest) -> Response:
    """Serve POST /detokenize. Raises ApiError."""
    service.check_name(request.model)
    return JSONResponse({"prompt": await service.run_off_loop(_detokenize_ids, service, request.tokens)})


def _detokenize_ids(service: Service, ids: list[int]) -> str:
    tokenizer, size = service.vocabulary.require_tokenizer(), service.llm.target.vocab_size
    if len(ids) > service.llm.target.context_length:
        raise ApiError(400, f"tokens may hold at most {service.llm.target.context_length}", "tokens")
    if any(token >= size for token in ids):
        raise ApiError(400, f"tokens holds an id outside the vocabulary of {size} tokens", "tokens")
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def describe_tokenizer(service: Service) -> dict[str, Any]:
    """Build the body of /tokenizer_info: special tokens, chat template and lengths, for tokenization by clients."""
    tokenizer = service.vocabulary.require_tokenizer()
    special_tokens = {
        name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)
    }
    return {
        **special_tokens,
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": service.llm.target.vocab_size,
        "model_max_length": service.llm.target.context_length,
        "chat_template": service.chat_template.source,
        "added_tokens_decoder": {str(i): token for i, token in service.vocabulary.added_tokens.items()},
    }
