"""Conversion of one record of a JSON Lines file or a dataset to a document: text, prompt and completion, or a chat.

Only the assistant's replies of a chat are learnt. Their positions in the token ids are found by rendering the chat up
to each turn, because few templates mark them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from foredraft.errors import ForedraftError
from foredraft.train.documents import Document

RECORD_FORMATS = (
    '{"text": ..}, {"prompt": .., "completion": ..}, {"messages": [..]} or {"ids": [..], "prompt_tokens": n}'
)
SEQ2SEQ_KEYS = {"source", "text"}  # a text with other columns beside them may name its origin as source
ChatMessages = Sequence[Mapping[str, Any]]


def parse_document(record: Mapping[str, Any], tokenizer: Any, location: str) -> Document:
    """Convert a record to a document. Its keys determine the format.

    Args:
        record: One object of RECORD_FORMATS.
        tokenizer: Tokenizer of the target; None = only token ids can be read.
        location: File and line, for messages.

    Raises:
        ForedraftError: if the record has no known format or does not fit the tokenizer.
    """
    if "source_ids" in record or set(record) == SEQ2SEQ_KEYS:
        raise ForedraftError(
            f"{location} has a source, and the target has no encoder; give the source as prompt and the text as "
            "completion, or remove the source"
        )
    if isinstance(record.get("ids"), list):  # written by AnswerWriter
        ids, count = np.array(record["ids"], dtype=np.int64), int(record.get("prompt_tokens", 1))
        return Document(ids, np.arange(len(ids)) >= count)
    if tokenizer is None:
        raise ForedraftError(
            f"the target has no tokenizer, so {location} cannot be read; give token ids in a .npy file"
        )
    if isinstance(record.get("messages"), list):
        return _encode_chat(record["messages"], tokenizer, location)
    if isinstance(record.get("prompt"), str):
        completion = record.get("completion", "")
        if not isinstance(completion, str):
            raise ForedraftError(f"{location}: the completion is not a string")
        return _encode_completion(record["prompt"], completion, tokenizer)
    if isinstance(record.get("text"), str):
        return encode_text(record["text"], tokenizer)
    raise ForedraftError(
        f"{location} has the keys {', '.join(map(str, record)) or 'none'}; a record is {RECORD_FORMATS}"
    )


def encode_text(content: str, tokenizer: Any) -> Document:
    """Encode a plain text. Every token is learnt, including the end-of-text token."""
    return Document(np.array(_append_end(list(tokenizer(content).input_ids), tokenizer), dtype=np.int64))


def _append_end(ids: list[int], tokenizer: Any) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _encode_completion(prompt: str, completion: str, tokenizer: Any) -> Document:
    before = list(tokenizer(prompt).input_ids)
    if not completion:
        return Document(np.array(before, dtype=np.int64), np.zeros(len(before), dtype=np.bool_))
    # The completion is encoded separately, because generation continues after the tokens of the prompt.
    after = _append_end(list(tokenizer(completion, add_special_tokens=False).input_ids), tokenizer)
    ids = np.array(before + after, dtype=np.int64)
    return Document(ids, np.arange(len(ids)) >= len(before))


def _encode_chat(messages: ChatMessages, tokenizer: Any, location: str) -> Document:
    if not getattr(tokenizer, "chat_template", None):
        raise ForedraftError(
            f"{location} is a chat and the target's tokenizer has no chat template; use prompt and completion"
        )
    if not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in messages):
        raise ForedraftError(f"{location}: a message has no role and content")
    ids = render_chat(messages, tokenizer, location, add_generation_prompt=False)
    loss_mask = np.zeros(len(ids), dtype=np.bool_)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            start = _count_common_prefix(
                ids, render_chat(messages[:turn], tokenizer, location, add_generation_prompt=True)
            )
            stop = _count_common_prefix(
                ids, render_chat(messages[: turn + 1], tokenizer, location, add_generation_prompt=False)
            )
            loss_mask[start:stop] = True
    return Document(np.array(ids, dtype=np.int64), loss_mask)


def render_chat(messages: ChatMessages, tokenizer: Any, location: str, add_generation_prompt: bool) -> list[int]:
    """Return the token ids of a chat.

    Args:
        messages: Messages with role and content.
        tokenizer: Tokenizer with a chat template.
        location: File and line, for messages.
        add_generation_prompt: Whether the ids end with the header of an assistant's reply.

    Raises:
        ForedraftError: if the template rejects the messages.
    """
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=True
        )
    except Exception as error:  # templates raise any type, e.g. for roles that they do not support
        raise ForedraftError(f"{location}: the chat template refuses the messages: {error}") from None
    return list(encoded["input_ids"])


def _count_common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the leading tokens that two sequences share."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def parse_prompt(record: Mapping[str, Any], tokenizer: Any, location: str, length: int) -> list[int]:
    """Return the prompt of a record, which the target continues.

    Args:
        record: One object of RECORD_FORMATS. A chat ends before its last reply.
        tokenizer: Tokenizer of the target.
        location: File and line, for messages.
        length: Tokens of a plain text that become its prompt.
    """
    messages = record.get("messages")
    if isinstance(messages, list):
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        if not getattr(tokenizer, "chat_template", None):
            raise ForedraftError(f"{location} is a chat and the target's tokenizer has no chat template")
        return render_chat(messages, tokenizer, location, add_generation_prompt=True)
    prompt = record.get("prompt")
    if isinstance(prompt, str) and getattr(tokenizer, "chat_template", None):
        return render_chat([{"role": "user", "content": prompt}], tokenizer, location, add_generation_prompt=True)
    return parse_document(record, tokenizer, location).make_prompt(length)
