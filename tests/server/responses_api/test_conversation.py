"""Items as messages of a chat: which of them are one message of the assistant."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from foredraft.server.responses_api.conversation import build_messages, list_items
from foredraft.server.responses_api.input_items import Items

USER = {"role": "user", "content": "u"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "r"}]}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}


def read(rows: list[dict[str, Any]]) -> list[Any]:
    return TypeAdapter(Items).validate_python(rows)


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ([USER, TEXT, USER], ["user u", "assistant a", "user u"]),
        ([THOUGHT, TEXT, CALL, CALL, RESULT], ["assistant [t] a ff", "tool r"]),
        ([THOUGHT, CALL, RESULT, TEXT], ["assistant [t] f", "tool r", "assistant a"]),
        ([CALL, TEXT], ["assistant f", "assistant a"]),
        ([TEXT, THOUGHT, TEXT], ["assistant a", "assistant [t] a"]),
        ([THOUGHT], ["assistant [t]"]),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, TEXT], ["assistant [s] a"]),
    ],
)
def test_items_of_the_assistant_are_grouped_in_the_order_of_an_answer(rows: list[dict[str, Any]], shown: list[str]):
    """Two messages where the model wrote one would be another prompt than the one that the model has seen."""
    found = []
    for message in build_messages(read(rows)):
        reasoning = f"[{message.reasoning_content}]" if message.reasoning_content else ""
        calls = "".join(call.function.name for call in message.tool_calls or ())
        found.append(" ".join(filter(None, [message.role, reasoning, message.text, calls])))
    assert found == shown


def test_instructions_are_the_first_message():
    first, second = build_messages(read([USER]), "Be brief.")
    assert (first.role, first.text, second.role) == ("system", "Be brief.", "user")


def test_listed_items_are_items_again_and_keep_their_ids():
    items = read([USER, THOUGHT, TEXT, CALL | {"id": "fc_1"}, RESULT])
    rows = list_items(items)
    assert rows[3]["id"] == "fc_1"
    assert len({row["id"] for row in rows}) == len(rows)
    assert build_messages(read(rows)) == build_messages(items)
    assert list_items(read(rows)) == rows


def test_reasoning_of_another_server_cannot_be_read():
    with pytest.raises(ValidationError, match="leave the item out"):
        read([{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}])
