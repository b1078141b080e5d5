"""Requests no friend sends, by families, as the bytes that go over the wire.

Every prompt holds CANARY, so that a log or an error that repeats what a client wrote shows itself.
"""

import base64
import gzip
import json
from collections.abc import Iterator
from typing import Any

from tests.support.server.hostile_messages import CONVERSATIONS, PROMPT_FIELDS, SAMPLING_FIELDS, TOOL
from tests.support.server.hostile_wire import CANARY, CHUNK, HostileRequest, get, post, post_chunked

COMPLETE, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETE: {"prompt": CANARY, "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 2},
    RESPONSES: {"input": CANARY, "max_output_tokens": 2},
    MESSAGES: {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 2},
    COUNT: {"messages": [{"role": "user", "content": CANARY}]},
    TOKENIZE: {"prompt": CANARY},
    DETOKENIZE: {"tokens": [9]},
}
MEGA = 1 << 20


def corpus(vocab_size: int, context: int) -> Iterator[HostileRequest]:
    """Return the whole corpus, for a server without a key."""
    yield from _types()
    yield from _numbers()
    yield from _prompts(vocab_size, context)
    yield from _samplings(vocab_size)
    yield from _grammars()
    yield from _chats()
    yield from _tools()
    yield from _responses()
    yield from _messages()
    yield from _unknown()
    yield from _tokens(vocab_size)
    yield from _bodies()
    yield from _encodings()
    yield from _routes()
    yield from _wire()


def keys(key: str) -> Iterator[HostileRequest]:
    """Yield wrong keys, and the right key in the wrong field."""
    spoilt = (
        key[:-1],
        key + "x",
        key.upper(),
        key[::-1],
        "",
        " ",
        key * 10000,
        "null",
        f'"{key}"',
        key.replace("-", "\u2212"),
    )
    for scheme in ("Bearer ", "bearer  ", "Basic ", "", "Token ", "Bearer\t", "Digest "):
        for i, wrong in enumerate(spoilt):
            value = f"{scheme}{wrong}".encode()
            yield HostileRequest(
                f"key: {scheme.strip() or 'bare'} {i}", get("/v1/models", authorization=value), may_close=True
            )
    basic = base64.b64encode(f"{key}:me".encode())
    for value in (b"Basic " + basic, b"Basic " + basic[:-3], b"Basic \xff\xff", b"Bearer \xff\x80", key.encode()):
        yield HostileRequest(f"key: {value[:9]!r}", get("/v1/models", authorization=value))
    yield HostileRequest("key: in the query", get(f"/v1/models?api_key={key}&key={key}"))
    for wrong in (key[:-1], key + "x", "", f"Bearer {key}", key * 10000):
        yield HostileRequest(
            f"key: {wrong[:9]} in x-api-key", get("/v1/models", **{"x-api-key": wrong.encode()}), may_close=True
        )
    right = {"authorization": b"Bearer a", "x-api-key": key.encode()}
    yield HostileRequest("key: in x-api-key beside a wrong one", get("/v1/models", **right))
    yield HostileRequest("key: in a cookie", get("/v1/models", cookie=b"authorization=Bearer " + key.encode()))
    for path in ("//health", "/health/", "/health/../v1/models", "/health%2f..%2fv1/models", "/ready;/v1/models",
                 "/HEALTH", "/v1/models?/health", "/%2e%2e/health/../metrics"):  # fmt: skip
        yield HostileRequest(f"key: {path}", get(path))
    yield HostileRequest(
        "key: two", get("/v1/models", authorization=b"Bearer a\r\nauthorization: Bearer " + key.encode())
    )


def _make_request(name: str, path: str, extra: dict[str, Any], *fields: str, may_pass: bool = False) -> HostileRequest:
    data = post(path, BODIES[path] | extra)
    # what is far too much is refused before it is known which field holds it
    is_vast = max(data.count(b'"'), data.count(b",")) > 200_000
    return HostileRequest(f"{path} {name}", data, () if is_vast else fields, may_pass)


def _make_raw_request(
    name: str, text: bytes, *fields: str, path: str = COMPLETE, may_pass: bool = False
) -> HostileRequest:
    """Make a completion request whose body has one more pair, as it is written."""
    body = json.dumps(BODIES[path]).encode()[:-1] + b", " + text + b"}"
    return HostileRequest(f"{path} {name}", post(path, body), fields, may_pass)


WRONG: dict[str, tuple[Any, ...]] = {
    "int": ("1", 1.5, True, [1], {"a": 1}, 10**30, -(10**30), 1e308),
    "float": ("0.5", True, [0.5], {"a": 1}, 1e308, -1e308, 10**30),
    "bool": (2, "true", [True], {"a": True}, 0.0),
    "str": (1, True, ["a"], {"a": "a"}, 0.5),
    "list": (1, True, "a", {"a": 1}, [None], [{}], [[]]),
    "dict": (1, True, "a", [], [{}], {"\x01": 1}),
}
FIELDS: dict[str, str] = {
    "int": "max_tokens min_tokens n top_k seed prompt_logprobs truncate_prompt_tokens priority",
    "float": "temperature top_p min_p typical_p repetition_penalty presence_penalty frequency_penalty",
    "bool": "include_stop_str_in_output ignore_eos stream add_special_tokens return_token_ids "
    "return_tokens_as_token_ids speculative_metrics foredraft_trace",
    "str": "model cache_salt request_id user",
    "list": "allowed_token_ids stop_token_ids bad_words",
    "dict": "logit_bias stream_options response_format structured_outputs prediction speculative",
}


def _types() -> Iterator[HostileRequest]:
    for kind, names in FIELDS.items():
        for name in names.split():
            for i, value in enumerate(WRONG[kind]):
                path = (COMPLETE, CHAT)[i % 2]
                may_pass = (name, value) == ("temperature", 10**30)
                yield _make_request(f"{name} = {str(value)[:20]}", path, {name: value}, name, may_pass=may_pass)
    for name, path in (("prompt", COMPLETE), ("messages", CHAT), ("prompt", TOKENIZE), ("tokens", DETOKENIZE)):
        for value in (1, 0.5, True, {}, {"a": [1]}):
            yield _make_request(f"{name} = {value}", path, {name: value}, name)


def _numbers() -> Iterator[HostileRequest]:
    for spelt in (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"1" * 5000, b"1." + b"1" * 5000, b"0x10",
                  b"01", b"+1", b".5", b"1e", b"- 1", b"1_000", "\uff11".encode(), b"1e" + b"9" * 300):  # fmt: skip
        yield _make_raw_request(f"a number spelt {spelt[:12]!r}", b'"temperature": ' + spelt)
        yield _make_raw_request(f"a number spelt {spelt[:12]!r} deep down", b'"logit_bias": {"30": ' + spelt + b"}")
    for name in (
        "n",
        "best_of",
        "logprobs",
        "prompt_logprobs",
        "max_tokens",
        "min_tokens",
        "seed",
        "top_k",
        "priority",
    ):
        for value in (10**9, 10**30, -2, -(10**9)):
            fine = (name, value) in {("seed", 10**9), ("seed", -2), ("seed", -(10**9)), ("top_k", 10**9),
                                     ("priority", 10**9), ("priority", -2), ("priority", -(10**9)),
                                     ("max_tokens", 10**9)}  # fmt: skip
            yield _make_request(f"{name} = {value:g}", COMPLETE, {name: value}, name, may_pass=fine)
    yield _make_raw_request("temperature -0", b'"temperature": -0.0', may_pass=True)
    yield _make_raw_request("n -0", b'"n": -0', "n")
    yield _make_raw_request("a denormal temperature", b'"temperature": 5e-324', may_pass=True)
    yield _make_raw_request("a denormal top_p", b'"temperature": 1, "top_p": 5e-324', may_pass=True)
    yield _make_raw_request("a tiny penalty", b'"repetition_penalty": 5e-324', may_pass=True)
    yield _make_request("top_logprobs = 10**6", CHAT, {"logprobs": True, "top_logprobs": 10**6}, "top_logprobs")
    yield _make_request("logprobs -1 in a chat", CHAT, {"logprobs": -1}, "logprobs")
    yield _make_request("more than memory", COMPLETE, {"max_tokens": 10**9, "stop_token_ids": list(range(256))},
                 "max_tokens", may_pass=True)  # fmt: skip


def _prompts(vocab_size: int, context: int) -> Iterator[HostileRequest]:
    long = "ab " * context
    odd: list[Any] = [
        [], "", [""], [[]], [[], []], None, [None], ["a", None], ["a", 1], [1, "a"], [1, [1]], [[1], 1], [[1], "a"],
        [["a"]], [[[1]]], [{}], [True], [False, 1], [1.0], [1, 1.5], [[1.5]], [[True]], [-1], [[-1]], [-(10**30)],
        [vocab_size], [[9], [vocab_size]], [1 << 31], [1 << 63], [1 << 64], [10**60], [9] * context,
        [9] * (context + 1), [9] * 100_000, [[9] * context] * 2, ["a", ""], ["a"] * 65, [[9]] * 100_000,
        ["a"] * 100_000, [[9]] * 63 + [[vocab_size]], long * 40, [long * 40], "\U0001f363" * 100 * context,
        "<end>" * 100 * context,
    ]  # fmt: skip
    for value in odd:
        shown = json.dumps(value)[:24] + f" ({len(value) if isinstance(value, list | str) else 0})"
        yield _make_request(f"prompt = {shown}", COMPLETE, {"prompt": value}, "prompt")
    yield _make_request("prompts times n", COMPLETE, {"prompt": ["a"] * 64, "n": 16}, "n")
    yield HostileRequest("no prompt", post(COMPLETE, {"max_tokens": 1}), ("prompt",))
    yield _make_request("best_of", COMPLETE, {"best_of": 16}, "best_of")
    yield _make_request("echo a lot", COMPLETE, {"prompt": long * 40, "echo": True, "logprobs": 20}, "prompt")
    yield _make_request(
        "truncated", COMPLETE, {"prompt": long * 100, "truncate_prompt_tokens": 1}, "prompt", may_pass=True
    )
    for name, path, extra in (
        ("too much to tokenize", TOKENIZE, {}), ("spelt out", TOKENIZE, {"return_token_strs": True}),
        ("cut to one token", COMPLETE, {"truncate_prompt_tokens": 1}),
    ):  # fmt: skip
        yield _make_request(name, path, {"prompt": "ab( " * (MEGA // 4)} | extra, "prompt")
    said = [{"role": "user", "content": "<end>a" * 150_000}]
    yield _make_request("cut to one token", CHAT, {"messages": said, "truncate_prompt_tokens": 1}, "messages")
    yield HostileRequest("a chat to tokenize", post(TOKENIZE, {"messages": said}), ("messages",))


def _samplings(vocab_size: int) -> Iterator[HostileRequest]:
    odd: list[tuple[str, Any]] = [
        ("stop", [f"{i:06d}" for i in range(150_000)]), ("stop", "x" * MEGA), ("stop", ["x" * MEGA]), ("stop", ""),
        ("stop", [""]), ("stop", ["a", ""]), ("stop", [1]), ("stop", [["a"]]), ("stop", {"a": 1}), ("stop", ["a"] * 5),
        ("logit_bias", {str(i): 1 for i in range(100_000)}), ("logit_bias", {"a": 1}), ("logit_bias", {"1.0": 1}),
        ("logit_bias", {"-1": 1}), ("logit_bias", {" 1": 1}), ("logit_bias", {"+1": 1}), ("logit_bias", {"1e3": 1}),
        ("logit_bias", {"٣": 1}), ("logit_bias", {"": 1}), ("logit_bias", {"9" * 60: 1}),
        ("logit_bias", {str(vocab_size): 1}), ("logit_bias", {"9": 101}), ("logit_bias", {"9": "1"}),
        ("logit_bias", {"9": None}), ("logit_bias", {"9": 1e308}), ("logit_bias", {"a" * MEGA: 1}),
        ("stop_token_ids", [vocab_size]), ("stop_token_ids", [-1]), ("stop_token_ids", list(range(100_000))),
        ("allowed_token_ids", []), ("allowed_token_ids", [vocab_size]), ("allowed_token_ids", [9, -1]),
        ("allowed_token_ids", [9] * 100_000), ("bad_words", [""]), ("bad_words", ["x" * MEGA]),
        ("bad_words", ["x"] * 100_000), ("bad_words", [[9]]), ("cache_salt", "x" * MEGA), ("cache_salt", ""),
        ("request_id", "../../etc/passwd"), ("request_id", "a\r\nset-cookie: b"), ("request_id", "x" * MEGA),
        ("model", "x" * MEGA), ("model", "<script>alert(1)</script>"), ("model", "../../etc/passwd"), ("model", ""),
        ("model", "'; DROP TABLE models; --"), ("stream_options", {"include_usage": True}),
        ("stream_options", {}), ("speculative", {"num_speculative_tokens": 10**9}),
        ("speculative", {"num_speculative_tokens": -1}), ("speculative", {}),
        ("prediction", {"type": "content"}), ("prediction", {"type": "content", "content": [{"type": "image_url"}]}),
    ]  # fmt: skip
    for name, value in odd:
        yield _make_request(f"{name} = {json.dumps(value)[:24]} ({len(value)})", COMPLETE, {name: value}, name)
    yield _make_request(
        "streamed options that contradict", COMPLETE, {"stream": False, "stream_options": {}}, "stream_options"
    )
    long = {"type": "content", "content": "ab " * (MEGA // 2)}
    yield _make_request("a long prediction", CHAT, {"prediction": long}, "prediction")  # fmt: skip
    yield _make_request("min above max", COMPLETE, {"min_tokens": 9, "max_tokens": 3}, "min_tokens")
    yield _make_request("nothing to generate", COMPLETE, {"max_tokens": 0}, "max_tokens")
    yield _make_request("a MB of user", COMPLETE, {"user": "x" * MEGA}, "user", may_pass=True)


def _grammars() -> Iterator[HostileRequest]:
    def schema(of: Any) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": of}}}

    deep: Any = {"type": "integer"}
    for _ in range(18):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    many = {"type": "object", "properties": {f"field{i}": {"type": "string"} for i in range(1200)}}
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}
    schemas: list[tuple[Any, bool]] = [
        ({"type": "nothing"}, False), ({"type": 3}, False), (3, False), ([], False), ("{}", False),
        ({"$ref": "#/$defs/none"}, False), ({"$ref": "http://127.0.0.1:1/x"}, False), ({"$ref": "file:///etc/passwd"},
        False), ({"$ref": "#"}, True), ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, True),
        ({"$ref": "#/$defs/n", "$defs": {"n": node}}, True), (deep, True), (many, True), (False, True),
        ({"type": "string", "pattern": "("}, False), ({"type": "string", "pattern": "(a{1,1000}){1,1000}"}, True),
        ({"type": "array", "minItems": 10**9}, True), ({"type": "string", "minLength": 10**9}, True),
        ({"type": "integer", "minimum": 5, "maximum": 1}, True), ({"enum": []}, True),
        ({"enum": [f"v{i}" for i in range(5000)]}, True), ({"anyOf": [{"type": "string"}] * 1000}, True),
        ({"allOf": [{"anyOf": [{"const": i} for i in range(30)]}] * 12}, True), ({"type": "object", "x": "y" * MEGA},
        False), ({"not": {}}, True),
    ]  # fmt: skip
    for i, (of, may_pass) in enumerate(schemas):
        yield _make_request(f"schema {i} {json.dumps(of)[:40]}", CHAT, schema(of), "response_format", may_pass=may_pass)
    regexes = [("(", False), ("", False), ("[", False), ("*", False), ("a{5,1}", False), ("(?=a)", False),
               ("\\1", False), ("(a*)*b", True), ("(a|a)*b", True), ("a{1000000}", True), ("(a{1,999}){999}", True),
               ("(" * 20000 + ")" * 20000, True), ("(" * 4000 + "a" + "*)" * 4000, True), ("x" * 60000, True),
               ("[^a]{1,50000}", True), ("(?P<a>b)(?P=a)", False), ("\\p{Nonsense}", False), ("x" * MEGA, False),
               ("(.*a){25}", True), ("\\u{110000}", False)]  # fmt: skip
    for pattern, may_pass in regexes:
        yield _make_request(
            f"regex {pattern[:30]!r} ({len(pattern)})", COMPLETE, {"regex": pattern}, "regex", may_pass=may_pass
        )
    larks = ["start:", "start: start", "start: nothing", 'start: "a" start | "b"', "x: y", "start: /(/", "%import x",
             "%ignore /.*/\nstart: A", "(" * 30000, "start: " + '"a" ' * 12000]  # fmt: skip
    for lark in larks:
        yield _make_request(f"grammar {lark[:20]!r} ({len(lark)})", COMPLETE, {"structured_outputs": {"grammar": lark}},
                     "structured_outputs", may_pass=True)  # fmt: skip
    for i, value in enumerate([{}, {"choice": []}, {"choice": [""]}, {"choice": ["a"] * 10**5}, {"choice": [1]},
                               {"regex": "a", "grammar": "b"}, {"json": "{"}, {"json": "[" * 60000},
                               {"json_object": False}, {"structural_tag": {}}, {"regex": None}]):  # fmt: skip
        yield _make_request(f"structured_outputs {i}", COMPLETE, {"structured_outputs": value}, "structured_outputs",
                     may_pass=value == {"choice": [""]})  # fmt: skip
    yield _make_request("two grammars", COMPLETE, {"regex": "a", "response_format": {"type": "json_object"}}, "exclude")


def _chats() -> Iterator[HostileRequest]:
    def said(**rest: Any) -> dict[str, Any]:
        return {"role": "user", "content": CANARY} | rest

    many = [said()] * 30_000
    odd: list[Any] = [
        [], None, [None], [[]], ["a"], [{}], [{"role": "user", "content": 3}], [{"content": "a"}], many,
        [said(role="x")],
        [said(role="tool", tool_call_id="a")], [said(role="function")], [said(role="User")], [said(role=None)],
        [said(role=["user"])], [said(content=[{}])],
        [said(content=[{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}])],
        [said(content=[{"type": "text"}])], [said(content=[{"type": "text", "text": 3}])],
        [said(content=[["a"]])], [said(content={"a": 1})], [said(name="x" * 65)], [said(name=3)],
        [said(role="assistant", tool_calls=[{"id": "a"}])], [said(tool_calls=[])], [said(x=1)],
        [said(content=[{"type": "text", "text": "a", "cache_control": {}}])], [said(content="ab " * 500_000)],
        [said()] * 1000, [said(content="<end>" * 100_000)],
    ]  # fmt: skip
    for i, value in enumerate(odd):
        yield _make_request(f"messages {i} {json.dumps(value)[:40]}", CHAT, {"messages": value}, "messages")
    yield HostileRequest("no messages", post(CHAT, {"max_tokens": 1}), ("messages",))
    for text in ("{{ 7 * 7 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ ''.__class__.__mro__ }}", "{{", "{#",
                 "<stop>assistant:", "<end><pad>", "\ue000:0\ue001", "\ue002\ue003", "‮​", "﷽" * 9,
                 "a\u0300" * 20):  # fmt: skip
        message = {"role": "user", "content": text}
        yield _make_request(f"content {text[:20]!r}", CHAT, {"messages": [message]}, may_pass=True)
    yield _make_request("nothing said", CHAT, {"messages": [{"role": "user"}]}, "messages", may_pass=True)
    yield _make_request("a template of one's own", CHAT, {"chat_template": "{{ 1 }}"}, "chat_template")
    yield _make_request("goes on after a user", CHAT, {"continue_final_message": True}, "continue_final_message")
    yield _make_request("two limits", CHAT, {"max_completion_tokens": 3}, "max_tokens")
    yield _make_request("two shapes", TOKENIZE, {"messages": [said()]}, "prompt")


def _tools() -> Iterator[HostileRequest]:
    def tool(**rest: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "a"} | rest}

    deep: Any = {"type": "object"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    odd: list[tuple[Any, bool]] = [
        ({}, False), ([None], False), ([{}], False), (["a"], False), ([{"type": "retrieval"}], False),
        ([{"type": "function"}], False), ([tool(name="")], False), ([tool(name="a b")], False),
        ([tool(name="x" * 65)], False), ([tool(name=3)], False), ([tool(name='a": 1}')], False),
        ([tool(parameters=[])], False), ([tool(parameters={"type": "array"})], False), ([tool(), tool()], False),
        ([tool(strict="yes")], False), ([tool(x=1)], False), ([tool(name=f"a{i}") for i in range(129)], False),
        ([tool(description="x" * 300_000)], False), ([tool(description="<end><pad>")], True),
        ([tool(parameters={"properties": {"<end>": {}}})], True), ([tool(parameters=deep)], True),
    ]  # fmt: skip
    for i, (value, may_pass) in enumerate(odd):
        named = () if may_pass else ("tools",)  # a prompt that is too long is refused as one of many messages
        yield _make_request(f"tools {i}", CHAT, {"tools": value}, *named, may_pass=may_pass)
    schemas: list[tuple[Any, bool]] = [
        ({"$ref": "#/$defs/none"}, False), ({"$ref": "file:///etc/passwd"}, False), (deep, True),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, False),
        ({"properties": {"a": {"type": "string", "minLength": 10**9}}}, True),
        ({"properties": {"a": {"enum": [f"v{i}" for i in range(5000)]}}}, True),
        ({"properties": {f"a{i}": {} for i in range(1000)}}, True),
    ]  # fmt: skip
    for i, (schema, may_pass) in enumerate(schemas):
        body = {"tools": [tool(parameters=schema)], "tool_choice": "required"}
        yield _make_request(f"a required schema {i}", CHAT, body, may_pass=may_pass)
    for i, choice in enumerate(["x", "", 3, [], {}, {"type": "function"}, {"type": "function", "function": {}},
                                {"type": "function", "function": {"name": "b"}}, {"type": "x"}]):  # fmt: skip
        yield _make_request(f"tool_choice {i}", CHAT, {"tools": [tool()], "tool_choice": choice}, "tool_choice")
    yield _make_request("a choice without tools", CHAT, {"tool_choice": "required"}, "tool_choice")
    for i, value in enumerate([3, [], {"messages": []}, {"tools": []}, {"add_generation_prompt": False}, {"x": 1},
                               {"__class__": 1}, {"a": "x" * 300_000}]):  # fmt: skip
        yield _make_request(f"chat_template_kwargs {i}", CHAT, {"chat_template_kwargs": value}, "chat_template_kwargs")
    for effort in ("high", "", "x" * 33, 3):
        yield _make_request(
            f"reasoning_effort {str(effort)[:5]}", CHAT, {"reasoning_effort": effort}, "reasoning_effort"
        )
    call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    histories: list[Any] = [
        [{"role": "assistant", "tool_calls": [call | {"function": {"name": "a", "arguments": {}}}]}],
        [{"role": "assistant", "tool_calls": [call] * 129}], [{"role": "assistant", "tool_calls": [call | {"id": ""}]}],
        [{"role": "user", "content": CANARY, "tool_calls": [call]}],
        [{"role": "user", "content": CANARY, "reasoning_content": "a"}],
        [{"role": "tool", "content": CANARY}], [{"role": "assistant", "tool_calls": [call]},
                                                {"role": "tool", "tool_call_id": "d", "content": CANARY}],
    ]  # fmt: skip
    for i, messages in enumerate(histories):
        yield _make_request(f"a history with calls {i}", CHAT, {"messages": messages}, "messages")


def _responses() -> Iterator[HostileRequest]:
    call = {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}"}
    inputs: list[Any] = [
        "", [], None, 3, {}, [None], ["a"], [{}], [[]], [{"role": "tool", "content": "a"}], [{"role": "user"}],
        [{"role": "user", "content": 3}], [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}],
        [{"role": "user", "content": [{"text": "a"}]}], [{"role": "user", "content": ["a"]}],
        [{"role": "user", "content": "a", "x": 1}], [{"type": "item_reference", "id": "a"}],
        [{"type": "computer_call"}], [{"type": ["a"]}], [{"type": {"a": 1}, "role": "user"}],
        [call | {"arguments": {}}], [call | {"call_id": ""}], [call | {"name": "x" * 65}], [call] * 129,
        [{"type": "function_call_output", "call_id": "none", "output": CANARY}],
        [call, {"type": "function_call_output", "call_id": "c", "output": {}}],
        [{"type": "reasoning", "encrypted_content": CANARY}], [{"type": "reasoning", "content": "a"}],
        [{"role": "user", "content": "a"}] * 1025, [{"role": "user", "content": [{"type": "input_text", "text": "a"}] *
        1025}], "ab " * (MEGA // 2), [{"role": "user", "content": "ab " * (MEGA // 2)}],
    ]  # fmt: skip
    for i, value in enumerate(inputs):
        yield _make_request(f"input {i}", RESPONSES, {"input": value}, "input")
    function = {"type": "function", "name": "a"}
    odd: list[tuple[str, Any]] = [
        ("background", True), ("conversation", "a"), ("truncation", "auto"), ("prompt", {"id": "a"}),
        ("max_tool_calls", 3), ("stream_options", {"include_obfuscation": True}), ("include", ["file_search.results"]),
        ("include", ["reasoning.encrypted_content"] * 9), ("include", "a"), ("store", 1), ("max_output_tokens", 0),
        ("max_output_tokens", -1), ("max_output_tokens", "a"), ("max_tokens", 3), ("messages", []), ("n", 2),
        ("previous_response_id", "resp_none"), ("previous_response_id", ""), ("previous_response_id", "x" * 257),
        ("previous_response_id", "../../etc/passwd"), ("previous_response_id", 3), ("instructions", 3),
        ("metadata", {str(i): "a" for i in range(17)}), ("metadata", {"a": 1}),
        ("metadata", {"a" * 65: "a"}), ("metadata", {"a": "a" * 513}), ("metadata", []), ("reasoning", "high"),
        ("reasoning", {"effort": "high"}), ("reasoning", {"effort": "x" * 33}), ("reasoning", {"summary": "detailed"}),
        ("text", {"format": {"type": "json_schema", "name": "a"}}), ("text", {"verbosity": "high"}),
        ("text", {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}),
        ("text", {"format": {"type": "json_schema", "name": "a", "schema": {"x": "y" * MEGA}}}),
        ("text", {"format": {"type": "grammar"}}), ("top_logprobs", 3), ("top_logprobs", 10**9),
        ("tools", [{"type": "web_search"}]), ("tools", [{"type": "function", "function": {"name": "a"}}]),
        ("tools", [function | {"name": "a b"}]), ("tools", [function | {"parameters": {"type": "array"}}]),
        ("tools", [function, function]), ("tools", [function | {"strict": "yes"}]), ("tools", [None]), ("tools", {}),
        ("tools", [function | {"name": f"a{i}"} for i in range(129)]), ("tool_choice", "required"),
        ("tool_choice", function), ("tool_choice", {"type": "web_search"}), ("tool_choice", 3), ("tool_choice", []),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}), ("client_metadata", {"a": 1}),
        ("prompt_cache_key", "x" * 257), ("prompt_cache_retention", "24h"), ("chat_template_kwargs", {"x": 1}),
        ("stop", ["a"] * 5), ("stream", "true"), ("temperature", -1), ("top_p", 0), ("verify", "nothing"),
    ]  # fmt: skip
    for i, (name, value) in enumerate(odd):
        yield _make_request(f"{name} {i}", RESPONSES, {name: value}, name)
    yield _make_request("long instructions", RESPONSES, {"instructions": "ab " * (MEGA // 2)}, "input")
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [function | {"name": "b"}]}
    for choice in (function | {"name": "b"}, chosen):
        yield _make_request("another tool", RESPONSES, {"tools": [function], "tool_choice": choice}, "tool_choice")
    for method in ("GET", "DELETE"):
        for name in ("none", "resp_none", "%00", "..%2f..", "x" * 7000, "%ff", "<script>", "resp_none?x=1"):
            yield HostileRequest(
                f"{method} {RESPONSES}/{name[:12]}", get(f"{RESPONSES}/{name}", method), may_close=True
            )
    for query in ("limit=0", "limit=x", "limit=%D9%A3", "limit=1000", "order=up", "after=none", "x=1", "stream=true"):
        yield HostileRequest(f"GET input_items?{query}", get(f"{RESPONSES}/none/input_items?{query}"))
    for path in ("cancel", "compact", "input_items/x"):
        yield HostileRequest(f"POST {path}", post(f"{RESPONSES}/none/{path}", {}))


def _messages() -> Iterator[HostileRequest]:
    for i, value in enumerate(CONVERSATIONS):
        for path in (MESSAGES, COUNT):
            yield _make_request(f"messages {i}", path, {"messages": value}, "messages")
    yield _make_request("a long system", MESSAGES, {"system": "ab " * (MEGA // 2)}, "messages")
    for i, (name, value) in enumerate(PROMPT_FIELDS):
        for path in (MESSAGES, COUNT):
            yield _make_request(f"{name} {i}", path, {name: value}, name)
    for i, (name, value) in enumerate(SAMPLING_FIELDS):
        yield _make_request(f"{name} {i}", MESSAGES, {name: value}, name)
    yield _make_request("max_tokens in a count", COUNT, {"max_tokens": 3}, "max_tokens")
    chosen = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}
    yield _make_request("another tool", MESSAGES, chosen, "tool_choice")
    for path in ("batches", "batches/none", "count_tokens/x", "%00", "..%2f..", "x" * 7000):
        yield HostileRequest(f"{MESSAGES}/{path[:12]}", post(f"{MESSAGES}/{path}", {}), may_close=True)
    for text in (b"", b"{", b"[]", b"null", b'{"a":' * 10_000, b"\xff", b'"' * MEGA):
        yield HostileRequest(f"a message {text[:12]!r}", post(MESSAGES, text))
    yield HostileRequest("a message of 10 MB", post(MESSAGES, b" " * (10 * MEGA)), may_close=True)
    yield HostileRequest("a message as text", post(MESSAGES, {}, b"text/plain"))


def _unknown() -> Iterator[HostileRequest]:
    for path in BODIES:
        for name in ("x", "__class__", "model_config", "constructor", "__proto__", "Prompt", "", "a" * 100_000,
                     "<img src=x>", "{{ 1 }}", "%s%n", "\u202e"):  # fmt: skip
            yield _make_request(f"unknown {name[:12]!r}", path, {name: 1}, name[:40])
    for name, value in (("stream_options", {"x": 1}), ("speculative", {"num_speculative_tokens": 1, "x": 1}),
                        ("response_format", {"type": "text", "x": 1}), ("structured_outputs", {"regex": "a", "x": 1}),
                        ("prediction", {"type": "content", "content": "a", "x": 1})):  # fmt: skip
        yield _make_request(f"unknown within {name}", COMPLETE, {"stream": True, name: value}, name)
    yield _make_request("a hundred thousand", COMPLETE, {f"x{i}": 1 for i in range(100_000)}, "x0")


def _tokens(vocab_size: int) -> Iterator[HostileRequest]:
    for value in ([-1], [vocab_size], [1 << 62], [10**60], [1.5], ["1"], [True], [None], [[1]], [9] * 300_000):
        yield _make_request(f"tokens {str(value)[:20]}", DETOKENIZE, {"tokens": value}, "tokens")
    yield HostileRequest("no tokens", post(DETOKENIZE, {}), ("tokens",))
    yield HostileRequest("nothing to tokenize", post(TOKENIZE, {}), ("prompt",))


def _bodies() -> Iterator[HostileRequest]:
    texts: list[bytes] = [
        b"", b" ", b"{", b"}", b"[]", b"null", b"true", b"0", b'"a"', b"{]", b"{'a': 1}", b'{"a" 1}', b'{"a": }',
        b"{,}",
        b'{"prompt": "a",}', b'{"prompt": "a"} {}', b'{"prompt": "a"}\0', b'{"prompt": "a', b'{"prompt": "\\x"}',
        b'{"prompt": "\\u12"}', b'{"prompt": "a\nb"}', b"// a\n{}", b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "\\u0070rompt": "b"}', b"{" * 10_000, b"[" * 10_000, b"[" * 10_000 + b"]" * 10_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000, b"[{" * MEGA, b'"' * MEGA, b'"\\' * (MEGA // 2),
        b'{"a":"' + b"\\\\" * 700_000,
        b"0" * MEGA, b"-" * MEGA, b" " * 2_000_000, b"\\" * MEGA, b",".join([b'{"a":1}'] * 9), b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800"}', b'{"prompt": "\\u0000"}', b'{"prompt": "\0"}', b'{"\\ud800": 1}',
    ]  # fmt: skip
    for text in texts:
        yield HostileRequest(f"body {text[:24]!r} ({len(text)})", post(COMPLETE, text))
    big = b'{"prompt": "' + b"x" * (10 * MEGA) + b'"}'
    yield HostileRequest("10 MB", post(COMPLETE, big), may_close=True)
    yield HostileRequest(
        "10 MB chunked", post_chunked(COMPLETE, [big[i : i + CHUNK] for i in range(0, len(big), CHUNK)]), may_close=True
    )
    yield HostileRequest("10 MB in one chunk", post_chunked(COMPLETE, [big]), may_close=True)
    yield HostileRequest("ten thousand chunks", post_chunked(COMPLETE, [b" "] * 10_000))
    yield HostileRequest("a bad chunk size", post_chunked(COMPLETE, [], b"zz\r\n"), may_close=True)
    yield HostileRequest("an endless chunk size", post_chunked(COMPLETE, [], b"f" * 100_000), may_close=True)
    yield HostileRequest("a negative chunk", post_chunked(COMPLETE, [], b"-1\r\n\r\n"), may_close=True)
    yield HostileRequest("lies about a terabyte", post(COMPLETE, b"", **{"content-length": b"1" + b"0" * 12}))
    for length in (b"-1", b"1e3", b"0x10", b"", b"9" * 40, b"1, 2", b"+5"):
        yield HostileRequest(f"length {length!r}", post(COMPLETE, b"{}", **{"content-length": length}), may_close=True)


def _encodings() -> Iterator[HostileRequest]:
    good = json.dumps(BODIES[COMPLETE])
    for codec in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7"):
        text = good.encode(codec) if codec != "utf-7" else b"+AHsAIgBwACIAOg-1}"
        yield HostileRequest(codec, post(COMPLETE, text))
    for wrong in (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80"):
        yield HostileRequest(f"invalid UTF-8 {wrong!r}", post(COMPLETE, b'{"prompt": "' + wrong + b'"}'))
    for kind in (b"text/plain", b"", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"*/*",
                 b"application/jsonp", b"application/xml", b"a" * 1000, b"\xff\xfe",
                 b"application/json-seq"):  # fmt: skip
        yield HostileRequest(f"content type {kind[:30]!r}", post(COMPLETE, good.encode(), kind))
    for coding in (b"gzip", b"deflate", b"br", b"zstd", b"x", b"gzip, gzip", b"identity, gzip"):
        yield HostileRequest(
            f"content coding {coding!r}", post(COMPLETE, gzip.compress(good.encode()), **{"content-encoding": coding})
        )
    bomb = gzip.compress(b"0" * 50 * MEGA)
    yield HostileRequest("a bomb", post(COMPLETE, bomb, **{"content-encoding": b"gzip"}), may_close=True)


def _routes() -> Iterator[HostileRequest]:
    for path in ("/", "/static/page.css", "/v1/models", "/health", "/metrics", "/version", "/openapi.json"):
        for method in ("POST", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "BREW", "get"):
            yield HostileRequest(f"{method} {path}", get(path, method))
    for path in BODIES:
        for method in ("GET", "PUT", "DELETE", "TRACE", "OPTIONS", "CONNECT"):
            yield HostileRequest(f"{method} {path}", get(path, method))
    for target in ("/nowhere", "/v1", "/v1/", "/v1/completions/x", "/v2/completions", "//v1/models", "/admin", "/.env",
                   "/.git/config", "/static/../server.py", "/static/..%2f..%2fapp.py", "/static/%2e%2e/app.py",
                   "/static/....//app.py", "/static/..\\app.py", "/static//etc/passwd", "/static/%00", "/static/",
                   "/static/index.html%00.css", "/static/" + "a" * 7000, "/v1/models/%00", "/v1/models/../../etc",
                   "/v1/models/<script>alert(1)</script>", "/v1/models/" + "x" * 7000, "/%ff%fe", "/%", "/%zz",
                   "/v1/models/%ed%a0%80", "/v1/completions?stream=true", "http://evil.example/nowhere",
                   "https://127.0.0.1/v1/nowhere", "*", "nowhere", "evil.example:443"):  # fmt: skip
        yield HostileRequest(f"GET {target[:40]}", get(target), may_close=True)
    yield HostileRequest("a long target", get("/v1/models?" + "x" * 20_000))
    yield HostileRequest("a target of a megabyte", get("/" + "x" * MEGA), may_close=True)
    yield HostileRequest("a websocket", get("/v1/completions", upgrade=b"websocket", connection=b"Upgrade"))


def _wire() -> Iterator[HostileRequest]:
    line, end = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n", b"\r\n\r\n"
    garbage: list[tuple[str, bytes]] = [
        ("a header line of 1 MB", line + b"x: " + b"y" * MEGA + end),
        ("a header name of 1 MB", line + b"y" * MEGA + b": x" + end),
        ("10,000 headers", line + b"".join(b"x%d: y\r\n" % i for i in range(10_000)) + b"\r\n"),
        ("100,000 headers", line + b"a:\r\n" * 100_000 + b"\r\n"),
        ("no version", b"GET /v1/models" + end), ("HTTP/0.9", b"GET /v1/models\r\n\r\n"),
        ("HTTP/9", b"GET /nowhere HTTP/9.9" + end),
        ("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
         + bytes(500) + end), ("zeros", bytes(2000) + end), ("all bytes", bytes(range(256)) * 400),
        ("no colon", line + b"nonsense" + end), ("a space in a name", line + b"a b: c" + end),
        ("a NUL in a value", line + b"a: b\0c" + end), ("a bare CR", line + b"a: b\rc: d" + end),
        ("folded", b"GET /v1/models HTTP/1.1\r\n host: x" + end), ("no host", b"GET /v1/models HTTP/1.1" + end),
        ("two hosts", line + b"host: y" + end), ("two lengths", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
         b"content-length: 2\r\ncontent-length: 3" + end + b"{}x"),
        ("an unknown coding", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: x" + end),
        ("an expectation", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: miracles\r\ncontent-length: 0" + end),
        ("redis", b"*1\r\n$4\r\nINFO\r\n\r\n"), ("smtp", b"HELO x\r\nMAIL FROM: y\r\n\r\n"),
        ("ssh", b"SSH-2.0-x\r\n" + end),
        ("a long method", b"X" * MEGA), ("newlines", b"\r\n" * 50_000 + b"x" + end),
        ("a smuggled request", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 40\r\n"
         b"transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/nowhere HTTP/1.1\r\nhost: x\r\n\r\n"),
        ("pipelined", get("/nowhere") * 50), ("pipelined with garbage", get("/nowhere") + b"\xff" * 1000 + end),
        ("pipelined posts", post(COMPLETE, b"[]") * 50),
    ]  # fmt: skip
    for name, data in garbage:
        yield HostileRequest(f"wire: {name}", data, may_close=True)
