"""Sources of prompts, and inputs that are refused."""

import pytest

from tests.support.cli_fakes import TEXT, FakeBackend, FakeLLM


@pytest.fixture
def echo():
    """A backend that keeps the prompts it was given."""
    seen = []

    class Echo(FakeLLM):
        def stream(self, prompts, sampling, *, options=None):
            seen.extend(prompts)
            return super().stream(prompts, sampling)

    return FakeBackend({"draft_model": Echo("x")}), seen


def test_standard_input_is_the_prompt_to_the_last_byte(run, echo):
    backend, seen = echo
    assert run("generate", backend=backend, stdin="def f(é):\r\n\n").stdout == TEXT + "\n"
    assert seen == ["def f(é):\r\n\n"]


@pytest.mark.parametrize("args", [("-",), ("--file", "-")])
def test_a_dash_is_standard_input(run, echo, args):
    backend, seen = echo
    assert run("generate", *args, backend=backend, stdin="x").code == 0
    assert seen == ["x"]


def test_an_argument_wins_over_standard_input(run, echo):
    backend, seen = echo
    run("generate", "mine", backend=backend, stdin="theirs")
    assert seen == ["mine"]


def test_every_file_is_a_prompt_and_a_byte_order_mark_is_not_part_of_it(run, echo, tmp_path):
    backend, seen = echo
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfA\n")
    (tmp_path / "b").write_bytes(b"B")
    run("generate", "-f", str(tmp_path / "a"), "-f", str(tmp_path / "b"), backend=backend)
    assert seen == ["A\n", "B"]


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "standard input is empty"), (b"abc\xff", "not UTF-8 (byte 0xff at offset 3)"), (b"\xe2\x82", "not UTF-8")],
)
def test_standard_input_that_is_no_prompt(run, data, words):
    outcome = run("generate", stdin=data)
    assert outcome.code == 2
    [line] = outcome.error_lines
    assert words in line


def test_files_that_are_no_prompt(run, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    for name, words in (("empty", "is empty"), ("latin", "not UTF-8"), ("gone", "does not exist"), (".", "directory")):
        outcome = run("generate", "--file", str(tmp_path / name))
        assert outcome.code == 2
        [line] = outcome.error_lines
        assert words in line


def test_prompts_that_are_none(run):
    for args, words in ((("",), "is empty"), (("a\udcff",), "not UTF-8"), (("x", "--file", "y"), "not both")):
        outcome = run("generate", *args)
        assert outcome.code == 2
        [line] = outcome.error_lines
        assert words in line


def test_no_prompt_on_a_terminal_shows_how_to_give_one(run_on_terminal):
    outcome = run_on_terminal("generate", "--no-color")
    assert outcome.code == 2
    [line] = outcome.stdout.splitlines()
    assert 'foredraft generate "def fibonacci(n):"' in line
