"""`foredraft serve`: what the command line turns into, and one line for each mistake."""

import sys

import pytest

from foredraft.cli.backend import resolve_single_method
from foredraft.cli.engine_options import parse_size
from foredraft.cli.serve import (
    API_KEY_VARIABLE,
    CALL_FORMAT_NAMES,
    REASONING_FORMAT_NAMES,
    ServeOptions,
    build_settings,
    read_model_names,
)
from foredraft.cli.shell import UsageError
from foredraft.server.messages.formats import CALL_FORMATS, REASONING_FORMATS
from tests.support.cli_fakes import FakeBackend


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--port", "99999"], "--port"),
        (["--port", "x"], "--port"),
        (["--kv-memory", "much"], "--kv-memory takes a size"),
        (["--kv-memory", "0"], "--kv-memory takes a size"),
        (["--spec-method", "guess"], "unknown method 'guess'"),
        (["--spec-method", "ngram,draft_model"], "one --spec-method"),
        (["--spec-method", "none", "--spec-tokens", "3"], "drafts nothing"),
        (["--verify", "trust"], "unknown verification rule 'trust'"),
        (["--dtype", "int1"], "unknown dtype 'int1'"),
        (["--chat-template", "gone.jinja"], "cannot be read"),
        (["--tool-call-parser", "pythonic"], "--tool-call-parser pythonic does not exist; use one of auto, harmony"),
        (["--reasoning-parser", "deepseek_r1"], "use one of auto, harmony, think, mistral, none"),
        (["--api-key", " "], "API key is empty"),
        (["--api-key", "schlüssel"], "in ASCII"),
        (["--protect-metrics"], "--protect-metrics needs an API key"),
        (["--allowed-host", "box", "--host", "0.0.0.0"], "--allowed-host is for a server"),
        (["--allowed-host", "box", "--api-key", "k"], "--allowed-host is for a server"),
        (["--served-model-name", ""], "--served-model-name is empty"),
        (["--spec-tokens", "0"], "--spec-tokens 0 is for one call; a server without drafts has --spec-method none"),
        (["--posterior-threshold", "0.1"], "--posterior-threshold is a setting of the rule typical, not of auto"),
        (["--verify", "typical", "--posterior-alpha", "0"], "--posterior-alpha must be a finite number above 0"),
        (["--max-queue", "0"], "--max-queue"),
        (["--stored-responses", "-1"], "--stored-responses"),
        (["--stored-response-memory", "much"], "--stored-response-memory takes a size"),
        (["--request-timeout", "-1"], "--request-timeout"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(run, args: list[str], words: str):
    done = run("serve", *args)
    assert (done.code, done.stdout, len(done.error_lines)) == (2, "", 1)
    assert words in done.stderr


def test_the_names_of_formats_are_those_of_the_server():
    assert tuple(one.name for one in CALL_FORMATS) == CALL_FORMAT_NAMES
    assert (*(one.name for one in REASONING_FORMATS), "none") == REASONING_FORMAT_NAMES
    settings = build_settings(ServeOptions(tool_call_parser="hermes", reasoning_parser="none"))
    assert (settings.tool_call_parser, settings.reasoning_parser) == ("hermes", "none")


def test_the_bounds_of_stored_responses_reach_the_server():
    settings = build_settings(ServeOptions(stored_responses=3, stored_response_memory="2KiB"))
    assert (settings.stored_responses, settings.stored_response_bytes) == (3, 2048)


def test_an_address_of_another_machine_is_code_1(run):
    done = run("serve", "--host", "192.0.2.7", "--port", "0")
    assert (done.code, len(done.error_lines)) == (1, 1)
    assert "cannot listen on 192.0.2.7" in done.stderr


def test_without_the_extra_there_is_a_command_to_run(run, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith(("foredraft.server.", "fastapi"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = run("serve", "--port", "0")
    assert (done.code, len(done.error_lines)) == (1, 1)
    for command in ("pip install -e '.[serve]'", "pip install 'foredraft[serve]'"):
        assert command in done.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("512M", 512 << 20),
        ("1.5g", 3 << 29),
        ("100", 100),
        ("64 KB", 64 << 10),
        ("7B", 7),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "1X", "1e9", "1 2", "0G"])
def test_what_is_no_size(text: str):
    with pytest.raises(UsageError, match="--kv-memory"):
        parse_size(text)


def test_settings(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "from-env")
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    settings = build_settings(ServeOptions(chat_template=str(template), request_timeout=0, no_vllm_metrics=True))
    assert (settings.api_key, settings.chat_template) == ("from-env", "{{ messages }}")
    assert (settings.request_timeout, settings.has_vllm_names, settings.model_names) == (None, False, ("builtin",))
    assert build_settings(ServeOptions(api_key="given")).api_key == "given"
    monkeypatch.setenv(API_KEY_VARIABLE, " from a file \n")
    assert build_settings(ServeOptions()).api_key == "from a file"
    assert build_settings(ServeOptions(chat_template="plain")).has_plain_template
    assert not build_settings(ServeOptions(chat_template="none")).has_plain_template


def test_names_of_the_host_are_checked_where_only_this_machine_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    for host in ("127.0.0.1", "127.0.0.9", "localhost", "::1"):
        assert build_settings(ServeOptions(host=host, allowed_host=["Box"])).allowed_hosts == ("box",)
        assert build_settings(ServeOptions(host=host)).allowed_hosts == ()
    for options in (ServeOptions(host="0.0.0.0"), ServeOptions(host="box"), ServeOptions(api_key="k")):
        assert build_settings(options).allowed_hosts is None


def test_switches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    plain = build_settings(ServeOptions())
    assert (plain.has_strict_max_tokens, plain.has_access_log, plain.protects_metrics) == (False, False, False)
    asked = build_settings(ServeOptions(api_key="k", strict_max_tokens=True, access_log=True, protect_metrics=True))
    assert (asked.has_strict_max_tokens, asked.has_access_log, asked.protects_metrics) == (True, True, True)


def test_a_folder_is_served_under_its_own_name(tmp_path):
    (tmp_path / "tiny").mkdir()
    assert read_model_names(ServeOptions(model=str(tmp_path / "tiny"))) == ("tiny",)
    assert read_model_names(ServeOptions(model="org/model")) == ("org/model",)
    assert read_model_names(ServeOptions(model="x", served_model_name=["a", "b", "a"])) == ("a", "b")


def test_the_method():
    backend = FakeBackend()
    assert resolve_single_method(ServeOptions(), backend, "a server") == "draft_model"
    assert resolve_single_method(ServeOptions(model="org/model"), backend, "a server") == "ngram"
    assert resolve_single_method(ServeOptions(spec_method=["none"]), backend, "a server") == "none"
