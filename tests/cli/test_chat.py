"""`foredraft chat`: turns, commands and mistakes, against a library that answers at once."""

import json
from dataclasses import dataclass, field

import pytest

from foredraft.errors import ForedraftError
from foredraft.image_prompt import EncodedImagePrompt
from foredraft.request_options import RequestOptions
from tests.support.cli_fakes import TEXT, FakeBackend, FakeLLM


def prompts_of(backend):
    """Rendered conversations, in order."""
    return [text for text, _ in backend.calls if str(text).endswith("assistant:")]


def test_every_line_is_a_turn_and_replies_alone_reach_the_pipe(run):
    backend = FakeBackend()
    outcome = run("chat", stdin="hello\n\nand now?\n", backend=backend)
    assert outcome.code == 0
    assert outcome.stdout == f"{TEXT}\n{TEXT}\n"
    first, second = prompts_of(backend)
    assert first == "user: hello\nassistant:"
    assert second == f"user: hello\nassistant: {TEXT}\nuser: and now?\nassistant:"


def test_the_system_message_stands_first(run):
    backend = FakeBackend()
    run("chat", "--system", "Be brief.", stdin="hello\n", backend=backend)
    assert prompts_of(backend) == ["system: Be brief.\nuser: hello\nassistant:"]


def test_commands_change_the_conversation(run, tmp_path):
    backend = FakeBackend()
    saved = tmp_path / "talk.json"
    lines = [
        "one",
        "/undo",
        "two",
        "/clear",
        "/system Be kind.",
        "three",
        "/stats",
        "/history",
        f"/save {saved}",
        "/what",
    ]
    outcome = run("chat", stdin="\n".join(lines), backend=backend)
    assert prompts_of(backend)[1:] == ["user: two\nassistant:", "system: Be kind.\nuser: three\nassistant:"]
    assert "draft_model: 15 tokens" in outcome.stderr
    assert "user: three" in outcome.stderr
    assert "unknown command /what" in outcome.stderr
    assert [m["role"] for m in json.loads(saved.read_text())["messages"]] == ["system", "user", "assistant"]


def test_exit_leaves_and_later_lines_are_not_answered(run):
    outcome = run("chat", stdin="/exit\nhello\n")
    assert (outcome.code, outcome.stdout) == (0, "")


def test_the_oldest_turns_are_left_out_of_a_full_context(run):
    backend = FakeBackend({"draft_model": ShortContext("draft_model")})
    outcome = run("chat", "--max-tokens", "8", stdin="a\nb\nc\nd\n", backend=backend)
    assert outcome.stdout.count(TEXT) == 4
    assert "turns were left out" in outcome.stderr
    assert prompts_of(backend)[-1].endswith("user: d\nassistant:")


def test_a_message_beyond_the_context_is_refused_and_the_chat_goes_on(run):
    backend = FakeBackend({"draft_model": ShortContext("draft_model")})
    outcome = run("chat", stdin=f"{'x' * 200}\nhello\n", backend=backend)
    assert "shorten it" in outcome.stderr
    assert outcome.stdout == f"{TEXT}\n"


def test_a_model_without_a_template_gets_plain_lines_and_says_so(run):
    assert "no chat template" in run("chat", stdin="hello\n").stderr


def test_a_terminal_shows_what_was_accepted_in_green(run_on_terminal, monkeypatch):
    lines = iter(["hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    shown = run_on_terminal("chat").stdout
    assert "\x1b[32m" in shown
    assert "/help lists the commands" in shown


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--n", "2"), "one reply at a time"),
        (("--spec-method", "ngram,draft_model"), "a chat drafts with one method"),
        (("--chat-template", "missing.jinja"), "cannot be read"),
    ],
)
def test_mistakes_are_one_line(run, args, words):
    outcome = run("chat", *args, stdin="hello\n")
    assert outcome.code == 2
    assert words in outcome.error_lines[-1]


class ShortContext(FakeLLM):
    context_length = 100


class RefusingLLM(FakeLLM):
    def encode_chat(self, messages, *, chat_template=None):
        raise ForedraftError("the chat template refuses these messages: roles must alternate")


def test_what_a_template_refuses_is_shown_and_taken_back(run):
    outcome = run("chat", stdin="hello\n/history\n", backend=FakeBackend({"draft_model": RefusingLLM("x")}))
    assert "error: the chat template refuses" in outcome.stderr
    assert "user: hello" not in outcome.stderr


@dataclass
class SeeingLLM(FakeLLM):
    """A model whose prompts with images show their conversation."""

    seen: list = field(default_factory=list)

    def encode_image_chat(self, messages, *, chat_template=None):
        if any(
            part.get("image") == "bad.png" for m in messages if isinstance(m["content"], list) for part in m["content"]
        ):
            raise ForedraftError("an image cannot be read; save it again")
        self.seen.append(messages)
        return EncodedImagePrompt(tuple(range(12)), None)


def test_images_belong_to_the_next_message(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a b.png", "bad.png"):
        (tmp_path / name).write_bytes(b"")
    llm = SeeingLLM("x")
    lines = [
        "hello",
        "/image",
        "/image missing.png",
        "/image bad.png",
        "lost",
        "/image a b.png",
        "what is it",
        "/history",
    ]
    outcome = run("chat", "--max-images", "2", stdin="\n".join(lines), backend=FakeBackend({"draft_model": llm}))
    assert outcome.code == 0
    parts = [{"type": "image", "image": "a b.png"}, {"type": "text", "text": "what is it"}]
    [messages] = llm.seen
    assert [message["content"] for message in messages] == ["hello", TEXT, parts]
    for words in ("give a file", "no file missing.png", "error: an image cannot be read", "user: a b.png what is it"):
        assert words in outcome.stderr
    outcome = run("chat", stdin="/image a b.png\n", backend=FakeBackend())
    assert "--max-images" in outcome.stderr


def test_spec_tokens_0_is_an_option_of_every_turn(run):
    backend = FakeBackend()
    assert run("chat", "--spec-tokens", "0", stdin="hello\nagain\n", backend=backend).code == 0
    assert backend.request_options == [[RequestOptions(num_speculative_tokens=0, prediction="")]] * 2
    assert backend.specs == [{"method": "draft_model"}]


class StoppedLLM(FakeLLM):
    """Ctrl-C comes after some tokens of the reply."""

    num_tokens = 3

    def stream(self, prompts, sampling, *, options=None):
        for i, delta in enumerate(super().stream(prompts, sampling)):
            if i == self.num_tokens:
                raise KeyboardInterrupt
            yield delta


class UnstartedLLM(StoppedLLM):
    num_tokens = 0


def test_a_stopped_reply_has_statistics(run):
    """Fault: after Ctrl-C, /stats printed "no reply yet"."""
    outcome = run("chat", stdin="hello\n/stats\n", backend=FakeBackend({"draft_model": StoppedLLM("x")}))
    assert "draft_model: 3 tokens in " in outcome.stderr
    assert "3 target passes" in outcome.stderr
    unstarted = run("chat", stdin="hello\n/stats\n", backend=FakeBackend({"draft_model": UnstartedLLM("x")}))
    assert "no reply yet" in unstarted.stderr
