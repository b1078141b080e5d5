"""Preparation of a conversation for the engine: prompt, grammar, sampling parameters and parser."""

from dataclasses import dataclass, replace

from foredraft.errors import ForedraftError
from foredraft.server.errors import ApiError
from foredraft.server.grammars import find_grammar_field, read_grammar
from foredraft.server.messages.parser import MessageParser
from foredraft.server.messages.reasoning_format import ReasoningStart
from foredraft.server.messages.tools import ToolUse
from foredraft.server.prompts import check_text_size, encode_prediction
from foredraft.server.request_images import place_images
from foredraft.server.sampling_params import build_options, build_sampling
from foredraft.server.schemas import ChatRequest, list_image_urls
from foredraft.server.service import PromptSubmission, Service
from foredraft.server.template_rows import ChatInput
from foredraft.server.templates import EncodedChat
from foredraft.server.tool_request import check_results, read_tool_use, read_variables


@dataclass(frozen=True)
class PreparedChat:
    """Chat request that is ready for the engine, and what the parser of its answers needs."""

    submission: PromptSubmission
    use: ToolUse
    start: ReasoningStart  # place of the output's first token

    def make_parser(self, service: Service) -> MessageParser | None:
        """Make the parser of one answer; None if all of its text is content."""
        return service.dialect.make_parser(self.use, self.start)


def prepare_chat(service: Service, request: ChatRequest) -> PreparedChat:
    """Render, tokenize and check the messages of a chat request, or of a request of another route in its form.

    Runs on a thread, because it may take long.

    Raises:
        ApiError: the request cannot be served. `param` is a field of ChatRequest.
    """
    if service.llm.target.has_encoder and request.prompt_logprobs is not None:
        raise ApiError(400, "the input of an encoder has no log-probabilities; leave it out", "prompt_logprobs")
    use = read_tool_use(request)
    own = read_grammar(request)
    chat = encode_messages(service, request, use)
    ids, images = chat.ids, chat.images
    if request.truncate_prompt_tokens is not None:
        if images is not None:
            raise ApiError(400, "images cannot be truncated; leave it out", "truncate_prompt_tokens")
        ids = ids[-request.truncate_prompt_tokens :]
    service.check_length(len(ids), "messages")
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    service.check_output_length(len(ids), getattr(request, name), name)
    max_tokens = getattr(request, name) or service.count_free_tokens(len(ids))
    count = (request.top_logprobs or 0) if request.logprobs else None
    start = service.dialect.find_start(chat.end, own)
    grammar_field = find_grammar_field(request) or ("tools" if use.tools else None)
    try:
        grammar = service.dialect.build_grammar(use, own, start)
    except ForedraftError as error:
        raise ApiError(400, f"{grammar_field}: {error}", grammar_field) from None
    sampling = build_sampling(request, max_tokens, count, request.prompt_logprobs, grammar)
    shown_tokens = service.dialect.list_shown_tokens(use)
    options = build_options(request, encode_prediction(service, request), service.llm.rule, shown_tokens)
    return PreparedChat(PromptSubmission(ids, sampling, options, grammar_field, images), use, start)


def encode_messages(service: Service, request: ChatRequest, use: ToolUse, is_counted: bool = False) -> EncodedChat:
    """Render and tokenize the messages of a chat request.

    Args:
        service: state of the routes of one model.
        request: the request.
        use: its tools.
        is_counted: the tokens are only counted, so that they may be more than the context holds. Default False.

    Raises:
        ApiError: the messages cannot be rendered, or are too long.
    """
    check_results(request.messages)
    is_truncated = is_counted or request.truncate_prompt_tokens is not None
    check_text_size(service, sum(message.size for message in request.messages), "messages", is_truncated)
    adds_prompt = request.add_generation_prompt
    if request.continue_final_message and "add_generation_prompt" not in request.model_fields_set:
        adds_prompt = False
    variables = read_variables(request, service.chat_template)
    chat = ChatInput(request.messages, use.described, variables, adds_prompt, request.continue_final_message)
    encoded = service.chat_template.encode_chat(chat)
    ids, images = place_images(service, encoded.ids, list_image_urls(request.messages))
    return replace(encoded, ids=ids, images=images)
