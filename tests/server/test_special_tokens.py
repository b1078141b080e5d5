"""The field `skip_special_tokens`: special tokens in the text of an answer, streamed and not."""

import pytest

from tests.support import tiny_models
from tests.support.server.live_server import RunningServer

STOP = 1  # the special token <stop> of the small tokenizer
LETTER = tiny_models.tokenizer().convert_tokens_to_ids("a")
FORCED = {"allowed_token_ids": [STOP, LETTER], "max_tokens": 24, "seed": 2, "temperature": 3.0, "ignore_eos": True}
BODIES = {
    "/v1/completions": FORCED | {"prompt": "the"},
    "/v1/chat/completions": FORCED | {"messages": [{"role": "user", "content": "b"}]},
}


def read_text(choice: dict) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", BODIES)
def test_special_tokens_are_part_of_the_text_if_they_are_not_skipped(server: RunningServer, path: str):
    body = BODIES[path]
    default, skipped, shown = (
        server.post_ok(path, **body | fields, return_token_ids=True)["choices"][0]
        for fields in ({}, {"skip_special_tokens": True}, {"skip_special_tokens": False})
    )
    assert default == skipped
    assert set(shown["token_ids"]) == {STOP, LETTER}
    assert shown["token_ids"] == default["token_ids"]
    assert read_text(shown) == "".join("<stop>" if token == STOP else "a" for token in shown["token_ids"])
    assert read_text(default) == read_text(shown).replace("<stop>", "")
    chunks = server.chunks(path, **body, skip_special_tokens=False)
    parts = [
        choice.get("text") or choice.get("delta", {}).get("content") or "" for c in chunks for choice in c["choices"]
    ]
    assert "".join(parts) == read_text(shown)


def test_a_stop_string_may_be_a_special_token_that_is_shown(server: RunningServer):
    body = BODIES["/v1/completions"] | {"stop": "<stop>"}
    assert server.post_ok("/v1/completions", **body)["choices"][0]["finish_reason"] == "length"
    found = server.post_ok("/v1/completions", **body, skip_special_tokens=False)["choices"][0]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", "<stop>")
    assert "<stop>" not in found["text"]


def test_the_echo_of_token_ids_shows_them_too(server: RunningServer):
    body = {"prompt": [LETTER, STOP], "echo": True, "max_tokens": 0}
    assert server.post_ok("/v1/completions", **body)["choices"][0]["text"] == "a"
    shown = server.post_ok("/v1/completions", **body, skip_special_tokens=False)["choices"][0]
    assert shown["text"] == "a<stop>"


@pytest.mark.parametrize(
    ("name", "value"),
    [("skip_special_tokens", "no"), ("skip_special_tokens", 0), ("spaces_between_special_tokens", False)],
)
def test_another_value_is_refused_by_name(server: RunningServer, name: str, value: object):
    refused = server.post("/v1/completions", BODIES["/v1/completions"] | {name: value})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
