"""Turn chat messages into prompt tokens with the tokenizer's own template."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from foredraft.errors import ForedraftError
from foredraft.image_files import decode_data_url

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, and further keys that a template reads

Conversation = Sequence[Message]

IMAGE_PART = {"type": "image"}  # in place of an image, for a template
_IMAGE_TYPES = ("image", "image_url")

PLAIN_TEMPLATE = """\
{%- for message in messages %}{{ message.role }}: {{ message.content }}

{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""


def list_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return one conversation, or several, as a list of conversations."""
    if isinstance(messages, list | tuple) and messages and all(isinstance(entry, list | tuple) for entry in messages):
        return list(messages)
    return [messages]  # type: ignore[list-item]


def has_chat_template(tokenizer: Any | None) -> bool:
    """Whether the tokenizer brings a template of its own, as instruct models do."""
    return bool(getattr(tokenizer, "chat_template", None))


def encode_chat(
    tokenizer: Any | None,
    messages: Conversation,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    template_options: Mapping[str, Any] | None = None,
    is_source: bool = False,
    takes_images: bool = False,
) -> list[int]:
    """Render one conversation and return its token ids.

    Args:
        tokenizer: a transformers tokenizer.
        messages: dicts with `role` and `content`, oldest first.
        add_generation_prompt: end with the opening of the assistant's turn.
        continue_final_message: leave the last message open, so that the model continues it; there is then no
            generation prompt.
        chat_template: Jinja source in place of the tokenizer's own; PLAIN_TEMPLATE writes `role: content` lines.
        template_options: further variables of the template, such as {"enable_thinking": False}.
        is_source: the conversation is the input of an encoder, so it ends with the tokenizer's end token.
        takes_images: contents may have images, as of `list_images`. The template writes their placeholders.

    Raises:
        ForedraftError: without a tokenizer or template, for malformed messages, or if the template raises.
    """
    if tokenizer is None:
        raise ForedraftError("chat needs a tokenizer; pass token ids to generate() instead")
    _check_messages(messages, takes_images)
    if chat_template is None and not has_chat_template(tokenizer):
        raise ForedraftError(
            "the model has no chat template; give chat_template=... (foredraft.chat.PLAIN_TEMPLATE writes "
            "role: content lines), or pass bare text to generate()"
        )
    try:
        text = tokenizer.apply_chat_template(
            [{**message, "content": _join_parts(message["content"])} for message in messages],
            chat_template=chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            **dict(template_options or {}),
        )
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise ForedraftError(f"the chat template refuses these messages: {error}") from None
    ids: list[int] = tokenizer(text, add_special_tokens=chat_template == PLAIN_TEMPLATE).input_ids
    end = tokenizer.eos_token_id
    return [*ids, end] if is_source and end is not None and ids[-1:] != [end] else ids


def has_images(messages: Conversation) -> bool:
    """Whether a conversation has parts with images."""
    return bool(_list_image_parts(messages))


def list_images(messages: Conversation) -> list[Any]:
    """List the images of a conversation in order: paths, bytes, images of Pillow, and data URLs.

    They stand in parts of contents, {"type": "image", "image": IMAGE} or, as for servers, {"type": "image_url",
    "image_url": {"url": "data:image/png;base64,..."}}.
    """
    return [_read_image_part(part) for part in _list_image_parts(messages)]


def _list_image_parts(messages: Conversation) -> list[Message]:
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") in _IMAGE_TYPES]


def _read_image_part(part: Message) -> Any:
    if part["type"] == "image" and part.get("image") is not None:
        return part["image"]
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if part["type"] == "image" or not isinstance(url, str):
        raise ForedraftError(
            'a part with an image is {"type": "image", "image": PATH, bytes or an image of Pillow}, or {"type": '
            f'"image_url", "image_url": {{"url": "data:image/png;base64,..."}}}}; got {part!r:.80}'
        )
    return decode_data_url(url)


def _check_messages(messages: Conversation, takes_images: bool) -> None:
    if isinstance(messages, str | Mapping) or not len(messages):
        raise ForedraftError('messages must be a list such as [{"role": "user", "content": "Hello"}]')
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ForedraftError(f"message {i} must be a dict with 'role' and 'content', got {message!r:.80}")
        content = message["content"]
        for part in content if isinstance(content, list | tuple) else ():
            if takes_images and isinstance(part, Mapping) and part.get("type") in _IMAGE_TYPES:
                continue
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise ForedraftError(
                    f"message {i} has a part {kind!r:.80}, and text alone is read, no images; give parts such as "
                    '{"type": "text", "text": "Hello"}, and images to LLM.chat of a model with max_images'
                )


def _join_parts(content: Any) -> Any:
    """Join the text parts of a content. Templates that read parts get one. With images, the parts stay."""
    if isinstance(content, list | tuple) and any(part["type"] in _IMAGE_TYPES for part in content):
        return [{"type": "text", "text": part["text"]} if part["type"] == "text" else IMAGE_PART for part in content]
    return "".join(part["text"] for part in content) if isinstance(content, list | tuple) else content
