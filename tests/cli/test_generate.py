"""`foredraft generate` as a process: the streams, format and exit code of its output."""

import json
import os

import pytest

from foredraft.cli.backend import CliBackend
from foredraft.errors import ForedraftError
from foredraft.request_options import RequestOptions
from foredraft.verification.registry import RULES
from foredraft.verification.rules import TypicalAcceptance
from tests.support.cli_fakes import PIECES, TEXT, FakeBackend, FakeLLM

ESCAPE = "\x1b["


def test_a_pipe_receives_the_text_alone_and_the_figures_go_to_standard_error(run):
    outcome = run("generate", "def f(n):")
    assert outcome.code == 0
    assert outcome.stdout == TEXT + "\n"
    assert len(outcome.error_lines) == 1
    for word in ("tokens/s", "acceptance length 2.50", "acceptance rate 0.75", "2 target passes"):
        assert word in outcome.stderr


def test_a_text_that_ends_its_line_gets_no_second_line_break(run):
    backend = FakeBackend({"draft_model": FakeLLM("x", pieces=(("done\n", "plain"),))})
    assert run("generate", "p", backend=backend).stdout == "done\n"


def test_several_completions_come_in_order_though_they_stream_interleaved(run, tmp_path):
    (tmp_path / "a").write_text("A")
    (tmp_path / "b").write_text("B")
    outcome = run("generate", "--file", str(tmp_path / "a"), "--file", str(tmp_path / "b"), "--n", "2")
    assert outcome.stdout == (TEXT + "\n") * 4


def test_json_is_one_object_of_the_fixed_shape_and_nothing_else(run):
    outcome = run("generate", "p", "--json", "--logprobs", "1")
    result = json.loads(outcome.stdout)
    assert set(result) == {"completions"}
    [completion] = result["completions"]
    assert set(completion) == {"text", "token_ids", "finish_reason", "logprobs", "stats"}
    assert completion["text"] == TEXT
    assert completion["token_ids"] == [0, 1, 2, 3, 4]
    assert completion["finish_reason"] == "length"
    assert completion["stats"] == {
        "acceptance_length": 2.5, "acceptance_rate": 0.75, "per_position": [1.0, 0.5],
        "target_passes": 2, "draft_time": 0.25, "wall_time": 0.5,
    }  # fmt: skip
    # JSON has no infinity, and a reader that is strict about it must not choke
    assert completion["logprobs"][0]["raw_logprob"] is None
    assert len(completion["logprobs"]) == 5
    assert outcome.stderr == ""


def test_json_without_logprobs_says_null(run):
    assert json.loads(run("generate", "p", "--json").stdout)["completions"][0]["logprobs"] is None


def test_json_names_a_lossy_rule(run):
    backend = FakeBackend({"draft_model": FakeLLM("x", verification="typical")})
    outcome = run("generate", "p", "--json", "--verify", "typical", backend=backend)
    assert json.loads(outcome.stdout)["completions"][0]["verification"] == "typical"


def test_the_figures_name_a_lossy_rule(run):
    assert "lossy rule typical" in run("generate", "p", "--verify", "typical").stderr


def test_what_a_library_prints_does_not_reach_standard_output(run):
    class Chatty(FakeBackend):
        def choices(self):
            print("loading shards")
            return super().list_choices()

    json.loads(run("generate", "p", "--json", backend=Chatty()).stdout)


def test_the_command_is_greedy_by_default_and_passes_every_sampling_option_on(run):
    seen = []

    class Watching(FakeLLM):
        def stream(self, prompts, sampling, *, options=None):
            seen.append(sampling)
            return super().stream(prompts, sampling)

    backend = FakeBackend({"draft_model": Watching("x")})
    run("generate", "p", backend=backend)
    assert seen[0].is_greedy
    line = (
        "--temperature .5 --top-k 3 --top-p .9 --min-p .1 --typical-p .8 --repetition-penalty 1.1 --presence-penalty .2"
        " --frequency-penalty .3 --seed 7 --n 2 --max-tokens 9 --min-tokens 1 --stop a --stop b --stop-token-id 4"
        " --ignore-eos --logprobs 2 --json"
    )
    run("generate", "p", *line.split(), backend=backend)
    s = seen[1]
    assert (s.temperature, s.top_k, s.top_p, s.min_p, s.typical_p) == (0.5, 3, 0.9, 0.1, 0.8)
    assert (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (s.seed, s.n, s.max_tokens, s.min_tokens, s.stop) == (7, 2, 9, 1, ("a", "b"))
    assert (s.stop_token_ids, s.ignore_eos, s.logprobs) == ((4,), True, 2)


@pytest.mark.parametrize(
    ("args", "spec"),
    [
        ((), {"method": "draft_model"}),
        (("--spec-method", "none"), None),
        (("--spec-method", "ngram", "--spec-tokens", "3"), {"method": "ngram", "num_speculative_tokens": 3}),
        (("--spec-method", "ngram", "--spec-tokens", "auto"), {"method": "ngram"}),
        (
            ("--spec-method", "ngram", "--spec-tokens", "1:6, 4:0-2"),
            {"method": "ngram", "num_speculative_tokens": "1:6,4:0-2"},
        ),
        (("--spec-method", "ngram", "--spec-tokens", "0"), {"method": "ngram"}),
        (("--model", "m"), {"method": "ngram"}),
        (("--model", "m", "--spec-model", "d"), {"method": "draft_model", "model": "d"}),
    ],
)
def test_the_method_follows_from_what_is_given(run, args, spec):
    backend = FakeBackend()
    assert run("generate", "p", *args, backend=backend).code == 0
    assert backend.specs == [spec]


def test_a_terminal_shows_the_prompt_and_every_token_in_the_colour_of_its_origin(run_on_terminal):
    shown = run_on_terminal("generate", "def f(n):").stdout
    assert f"{ESCAPE}2mdef f(n):" in shown
    for piece, colour in ((PIECES[0][0], 32), (" +", 31), (" é", 36)):
        assert f"{ESCAPE}{colour}m{piece}{ESCAPE}0m" in shown
    for words in ("accepted draft 2", "corrected 1", "bonus 1", "plain 1", "tokens/s"):
        assert words in shown


@pytest.mark.parametrize(("args", "env"), [(("--no-color",), {}), ((), {"NO_COLOR": "1"}), ((), {"TERM": "dumb"})])
def test_colours_can_be_turned_off(run_on_terminal, args, env):
    shown = run_on_terminal("generate", "p", *args, **env).stdout
    assert "\x1b" not in shown
    assert TEXT in shown


def test_a_pipe_gets_no_colours_even_where_colours_are_forced(run):
    outcome = run("generate", "p", FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b" not in outcome.stdout + outcome.stderr


def test_a_terminal_does_not_obey_what_a_model_writes(run_on_terminal, run):
    backend = FakeBackend({"draft_model": FakeLLM("x", pieces=(("\x1b]0;owned\x07\ttab", "plain"),))})
    shown = run_on_terminal("generate", "p", "--no-color", backend=backend).stdout
    assert "\x1b" not in shown
    assert "␛]0;owned␇\ttab" in shown
    assert run("generate", "p", backend=backend).stdout == "\x1b]0;owned\x07\ttab\n"  # a pipe gets it as it is


def test_several_completions_are_titled_on_a_terminal(run_on_terminal):
    shown = run_on_terminal("generate", "p", "--n", "2", "--no-color").stdout
    assert shown.index("prompt 1, sample 1") < shown.index("prompt 1, sample 2")
    assert shown.count(TEXT) == 2


def test_ctrl_c_leaves_quietly(run):
    backend = FakeBackend({"draft_model": FakeLLM("x", raises=KeyboardInterrupt())})
    outcome = run("generate", "p", backend=backend)
    assert (outcome.code, outcome.stdout, outcome.stderr) == (130, "", "")


def test_a_request_that_fails_is_a_failure(run):
    backend = FakeBackend({"draft_model": FakeLLM("x", error="the target's distribution was not finite")})
    outcome = run("generate", "p", backend=backend)
    assert outcome.code == 1
    assert outcome.error_lines[-1] == "error: the target's distribution was not finite"


@pytest.mark.parametrize(
    "error",
    [
        ForedraftError("org/name is gated;\n ask for access"),
        OSError("no such host"),
        ForedraftError("the prompt has 600 tokens and the model's context is 512; shorten it"),
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 3 GiB\nlong advice"),
    ],
)
def test_a_failure_is_one_line_without_a_traceback(run, error):
    outcome = run("generate", "p", backend=FakeBackend(load_error=error))
    assert outcome.code == 1
    assert outcome.stdout == ""
    [line] = outcome.error_lines
    assert line.startswith("error: ")


def test_a_fault_of_ours_is_not_swallowed(run):
    with pytest.raises(ZeroDivisionError):
        run("generate", "p", backend=FakeBackend(load_error=ZeroDivisionError()))


def test_a_warning_is_one_line(run):
    class Warns(FakeBackend):
        def load(self, options, method):
            import warnings

            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("the draft d has more parameters than its target", stacklevel=1)
            return super().load(options, method)

    outcome = run("generate", "p", backend=Warns())
    assert outcome.code == 0
    assert outcome.error_lines[0] == "warning: the draft d has more parameters than its target"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--temperature", "-1"), "--temperature must be >= 0"),
        (("--temperature", "nan"), "--temperature must be a finite number"),
        (("--top-p", "0"), "--top-p must lie in (0, 1]"),
        (("--top-p", "1.5"), "--top-p"),
        (("--top-k", "-2"), "--top-k must be >= 0"),
        (("--max-tokens", "0"), "--max-tokens must be at least 1"),
        (("--min-tokens", "500"), "--min-tokens"),
        (("--n", "0"), "--n must be at least 1"),
        (("--stop", ""), "remove it"),
        (("--top-k", "many"), "--top-k"),
        (("--spec-tokens", "-1"), "--spec-tokens takes a number, a range such as 2-6, auto, or a table"),
        (("--spec-tokens", "many"), "by batch size such as 1:6,4:2-4,32:0; got 'many'"),
        (("--spec-tokens", "1:4,1:2"), "--spec-tokens: batch sizes rise and occur once"),
        (("--spec-tokens", "0", "--compare"), "--compare measures drafting methods; leave"),
        (("--prediction", __file__, "--compare"), "--compare measures drafting methods; leave"),
        (("--prediction", __file__, "--spec-tokens", "0"), "--spec-tokens 0 drafts nothing; leave one of the two out"),
        (
            ("--prediction", "gone.txt"),
            "prediction file 'gone.txt' does not exist; check the path given to --prediction",
        ),
        (("--prediction", os.devnull), "is empty; leave --prediction out"),
        (("--prediction", __file__, "--prediction", __file__), "1 prompts and 2 predictions; give one --prediction"),
        (("--posterior-threshold", ".2"), "--posterior-threshold is a setting of the rule typical, not of auto"),
        (
            ("--verify", "match", "--posterior-alpha", ".2"),
            "--posterior-alpha is a setting of the rule typical, not of",
        ),
        (("--verify", "typical", "--posterior-threshold", "0"), "--posterior-threshold must lie in (0, 1], got 0.0"),
        (("--verify", "typical", "--posterior-alpha", "-1"), "--posterior-alpha must be a finite number above 0"),
        (("--verify", "typical", "--posterior-alpha", "nan"), "--posterior-alpha must be a finite number above 0"),
        (("--verify", "typical", "--posterior-alpha", "x"), "--posterior-alpha"),
        (("--speculative-config", '{"posterior_alpha": "x"}', "--verify", "typical"), "--posterior-alpha must be a"),
        (("--spec-method", "telepathy"), "unknown method 'telepathy'; use one of: none, draft_model, ngram"),
        (("--spec-method", "ngram,draft_model"), "--compare"),
        (("--spec-method", "none", "--spec-tokens", "2"), "leave --spec-model, --spec-tokens and --spec-option out"),
        (("--verify", "hope"), "unknown verification rule 'hope'; use one of: auto, match"),
        (("--dtype", "int3"), "unknown dtype 'int3'; use one of: auto"),
        (("--logprobs", "1"), "add --json"),
        (("--frobnicate",), "--frobnicate"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(run, args, words):
    outcome = run("generate", "p", *args)
    assert outcome.code == 2
    assert outcome.stdout == ""
    [line] = outcome.error_lines
    assert words in line


def test_spec_tokens_0_and_predictions_are_options_of_the_requests(run, tmp_path):
    """Guards an option that is read and not passed on: without it the requests draft as always."""
    backend = FakeBackend()
    assert run("generate", "p", backend=backend).code == 0
    assert run("generate", "p", "--spec-tokens", "0", backend=backend).code == 0
    assert run("generate", "p", "--spec-tokens", "4", backend=backend).code == 0
    assert [[one.num_speculative_tokens for one in call] for call in backend.request_options] == [[None], [0], [None]]
    assert not any(one.prediction for call in backend.request_options for one in call)
    paths = []
    for name in "abc":
        (tmp_path / name).write_bytes(f"{name}\r\n".encode())
        paths.append(str(tmp_path / name))
    files = ["--file", paths[0], "--file", paths[1]]
    assert run("generate", *files, "--prediction", paths[2], backend=backend).code == 0
    assert backend.request_options[-1] == [RequestOptions(prediction="c\r\n")] * 2
    assert run("generate", *files, "--prediction", paths[2], "--prediction", paths[0], backend=backend).code == 0
    assert [one.prediction for one in backend.request_options[-1]] == ["c\r\n", "a\r\n"]


def test_thresholds_make_the_rule_of_the_model(run):
    backend = FakeBackend()
    line = ("--verify", "typical", "--posterior-threshold", ".2", "--posterior-alpha", ".5")
    assert run("generate", "p", *line, backend=backend).code == 0
    assert backend.options.find_rule().verify == TypicalAcceptance(0.2, 0.5)
    config = '{"method": "ngram", "verify": "typical", "posterior_alpha": 0.7}'
    assert run("generate", "p", "--speculative-config", config, backend=backend).code == 0
    assert backend.options.find_rule().verify == TypicalAcceptance(posterior_alpha=0.7)
    assert backend.specs[-1] == {"method": "ngram"}
    assert run("generate", "p", "--verify", "typical", backend=backend).code == 0
    assert backend.options.find_rule() is RULES["typical"]


def test_the_library_gets_thresholds_predictions_and_no_drafts(run, tmp_path):
    """The whole way, with the built-in pair. A prediction that is right takes few passes."""
    line = ("generate", "def f(", "--max-tokens", "40", "--json")

    def generate(*args: str) -> dict:
        outcome = run(*line, *args, backend=CliBackend())
        assert outcome.code == 0, outcome.stderr
        return json.loads(outcome.stdout)["completions"][0]

    plain = generate("--spec-tokens", "0")
    assert plain["stats"]["target_passes"] == len(plain["token_ids"])
    (tmp_path / "right").write_text(plain["text"], encoding="utf-8")
    predicted = generate("--spec-method", "none", "--prediction", str(tmp_path / "right"))
    assert predicted["token_ids"] == plain["token_ids"]
    assert predicted["stats"]["target_passes"] < len(plain["token_ids"]) / 2
    sampled = ("--temperature", "1", "--seed", "1", "--spec-tokens", "3", "--verify", "typical")
    strict, loose = (
        generate(*sampled, "--posterior-threshold", value, "--posterior-alpha", value) for value in ("1", "0.000001")
    )
    assert strict["verification"] == loose["verification"] == "typical"
    assert loose["stats"]["acceptance_rate"] > strict["stats"]["acceptance_rate"]


def test_settings_of_a_method_reach_it_as_numbers_and_lists(run):
    """Trees are lists; a setting passed on as text would be refused by every method."""
    backend = FakeBackend()
    options = ("--spec-option", "tree_nodes=16", "--spec-option", "branching=[3,1]", "--spec-option", "model=x")
    assert run("generate", "x", "--spec-method", "ngram", *options, backend=backend).code == 0
    assert backend.specs[-1] == {"method": "ngram", "tree_nodes": 16, "branching": [3, 1], "model": "x"}
    refused = run("generate", "x", "--spec-option", "tree_nodes", backend=backend)
    assert refused.code == 2
    assert "KEY=VALUE" in refused.stderr


class InstructLLM(FakeLLM):
    has_chat_template = True


def test_a_prompt_for_an_instruct_model_gets_a_note_or_with_chat_its_template(run):
    backend = FakeBackend({"draft_model": InstructLLM("x")})
    outcome = run("generate", "hello", backend=backend)
    assert outcome.error_lines[0].startswith("note: the model has a chat template; --chat applies it")
    assert not [text for text, _ in backend.calls if text.startswith("user:")]
    outcome = run("generate", "hello", "--chat", backend=backend)
    assert outcome.code == 0
    assert "chat template" not in outcome.stderr
    assert "user: hello\nassistant:" in [text for text, _ in backend.calls]


def test_chat_without_a_template_is_refused_with_what_to_do(run):
    outcome = run("generate", "hello", "--chat")
    assert outcome.code == 1
    assert outcome.stderr == (
        "error: the model has no chat template; leave --chat out, or use `foredraft chat`, which takes "
        "--chat-template\n"
    )
