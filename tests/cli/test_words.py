"""Words of other programs: vLLM's and llama.cpp's options, and what an unknown option is answered with."""

import pytest
import torch

from foredraft.cli.backend import CliBackend, build_drafter_spec
from foredraft.cli.generate_options import GenerateOptions
from foredraft.cli.serve import ServeOptions, apply_positional
from foredraft.cli.shell import UsageError
from foredraft.cli.speculative_config import read_speculative_config
from foredraft.cli.suggest import FOREIGN_OPTIONS, suggest_option
from foredraft.models.loading import parse_dtype
from tests.support.cli_fakes import FakeBackend


@pytest.mark.parametrize(
    "args",
    [
        ("-p", "text", "-m", "org/model", "-md", "draft", "--draft-max", "4"),
        ("--prompt", "text", "--model", "org/model", "--model-draft", "draft", "--num-speculative-tokens", "4"),
        ("text", "--model", "org/model", "--speculative-config", '{"model": "draft", "num_speculative_tokens": 4}'),
    ],
)
def test_the_words_of_llama_cpp_and_vllm_mean_ours(run, args):
    backend = FakeBackend()
    outcome = run("generate", *args, backend=backend)
    assert outcome.code == 0, outcome.stderr
    assert backend.options.model == "org/model"
    assert backend.specs == [{"method": "draft_model", "model": "draft", "num_speculative_tokens": 4}]


@pytest.mark.parametrize(
    ("args", "spec"),
    [
        (("-md", "a", "--spec-model", "b"), {"method": "draft_model+draft_model", "model": ["a", "b"]}),
        (("--spec-method", "draft_model", "-md", "a", "-md", "b"), {"method": "draft_model", "model": ["a", "b"]}),
        (("--speculative-config", '{"model": ["a", "b"]}'), {"method": "draft_model+draft_model", "model": ["a", "b"]}),
        (
            ("--spec-method", "draft_model+draft_model", "--spec-option", "draft_model_2.model=b"),
            {"method": "draft_model+draft_model", "draft_model_2.model": "b"},
        ),
        (
            ("--speculative-config", '{"method": "draft_model+draft_model", "draft_model_2": {"model": "b"}}'),
            {"method": "draft_model+draft_model", "draft_model_2": {"model": "b"}},
        ),
    ],
)
def test_several_draft_models_can_be_given(run, args, spec):
    backend = FakeBackend()
    outcome = run("generate", "text", *args, backend=backend)
    assert outcome.code == 0, outcome.stderr
    assert backend.specs == [spec]


def test_further_keys_of_a_speculative_config_are_settings_of_the_method():
    options = GenerateOptions(speculative_config='{"method": "ngram", "branches": 2}')
    assert build_drafter_spec(read_speculative_config(options), "ngram") == {"method": "ngram", "branches": 2}


@pytest.mark.parametrize(("value", "rule"), [("standard", "reject"), ("block", "block")])
def test_the_rejection_sample_method_of_vllm_is_our_rule(value, rule):
    config = f'{{"method": "ngram", "rejection_sample_method": "{value}"}}'
    options = read_speculative_config(GenerateOptions(speculative_config=config))
    assert (options.verify, options.spec_option) == (rule, None)


def test_options_of_the_draft_model_go_to_the_drafter(run):
    backend = FakeBackend()
    args = ("--spec-dtype", "bfloat16", "--spec-revision", "v1", "--spec-max-model-len", "512", "--revision", "v2")
    outcome = run("generate", "text", "-md", "draft", *args, "--tokenizer", "words", backend=backend)
    assert outcome.code == 0, outcome.stderr
    expected = {"method": "draft_model", "model": "draft", "dtype": "bfloat16", "revision": "v1", "max_model_len": 512}
    assert backend.specs == [expected]
    assert (backend.options.revision, backend.options.tokenizer) == ("v2", "words")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            GenerateOptions(speculative_config='{"rejection_sample_method": "synthetic"}'),
            "takes standard or block, got 'synthetic'",
        ),
        (
            GenerateOptions(speculative_config='{"rejection_sample_method": "block", "verify": "match"}'),
            "give one of them",
        ),
        (GenerateOptions(speculative_config="{"), "is not JSON"),
        (GenerateOptions(speculative_config="3"), "takes a JSON object"),
        (GenerateOptions(speculative_config='{"method": "ngram"}', spec_method=["suffix"]), "give it once"),
    ],
)
def test_a_wrong_speculative_config_is_one_line(options, words):
    with pytest.raises(UsageError, match=words):
        read_speculative_config(options)


def test_serve_takes_the_model_as_an_argument():
    assert apply_positional(ServeOptions(model_argument="org/model")).model == "org/model"
    with pytest.raises(UsageError, match="give it once"):
        apply_positional(ServeOptions(model_argument="a", model="b"))


def test_a_prompt_given_twice_is_refused(run):
    outcome = run("generate", "a", "-p", "b")
    assert (outcome.code, "give it once" in outcome.stderr) == (2, True)


def test_a_second_prompt_option_is_refused(run):
    """Fault: `generate -p x -p y` dropped x without a word."""
    outcome = run("generate", "-p", "x", "-p", "y")
    assert (outcome.code, "each prompt in a file with --file" in outcome.error_lines[-1]) == (2, True), outcome.stderr


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--gpu-memory-utilization", "--kv-memory"),
        ("--ctx-size", "--max-model-len"),
        ("--spec-tokns", "--spec-tokens"),
    ],
)
def test_an_unknown_option_is_answered_with_the_one_that_was_meant(run, wrong, right):
    """Fault: --gpu-memory-utilization was answered with "Possible options: --spec-quantization"."""
    outcome = run("serve", wrong, "1")
    assert outcome.code == 2
    assert f"unknown option {wrong}; use " in outcome.error_lines[-1]
    assert right in outcome.error_lines[-1]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("--pipeline-parallel-size", "one server for each device"),
        ("--trust-remote-code", "never run"),
        ("--draft-min", "LEAST-MOST bounds a draft"),
    ],
)
def test_an_option_that_has_no_counterpart_is_answered_with_the_reason(run, wrong, reason):
    """Fault: "use no option: ..." for the first; --lora was answered with --no-color."""
    complaint = run("serve", wrong, "1").error_lines[-1]
    assert f"unknown option {wrong}; there is none here: " in complaint
    assert reason in complaint


@pytest.mark.parametrize(
    ("command", "args", "answer"),
    [
        ("generate", ("-ngl", "99"), "unknown option -ngl; use --device cuda"),
        ("serve", ("-ngl=99",), "unknown option -ngl; use --device cuda"),
        ("generate", ("-dp", "2"), "unknown option -dp; there is none here: start one server for each device"),
        ("generate", ("-fa",), "unknown option -fa; there is none here: the device decides"),
        ("generate", ("-fa", "on"), "unknown option -fa; there is none here: the device decides"),
        ("chat", ("-ctk", "q8_0"), "unknown option -ctk; use --kv-dtype"),
        ("serve", ("-np", "4"), "unknown option -np; use --max-batch"),
        ("generate", ("-np", "4"), "--max-batch is an option of foredraft serve only"),
    ],
)
def test_an_option_with_one_dash_and_several_letters_is_answered(run, command, args, answer):
    """Fault: -ngl 99 was read as -n gl ("not a valid integer"), -dp as -d, and -fa as the file a."""
    outcome = run(command, *(["text"] if command == "generate" else []), *args)
    assert outcome.code == 2
    assert answer in outcome.error_lines[-1]


def test_a_rule_that_is_given_twice_is_named_as_it_was_typed(run):
    """Fault: the message named `verify`, although the object has rejection_sample_method."""
    config = '{"method": "ngram", "rejection_sample_method": "standard"}'
    line = run("generate", "text", "--verify", "block", "--speculative-config", config).error_lines[-1]
    assert "rejection_sample_method is given in --speculative-config and with --verify" in line


def test_values_may_look_like_options_of_others(run):
    assert run("generate", "text", "--stop", "-fa").code == 0
    assert run("generate", "-n2", "--", "-fa").code == 0


@pytest.mark.parametrize(
    ("command", "option", "answer"),
    [
        ("serve", "--gpu-memory-utilization", "use --kv-memory with a size such as 2GiB"),
        ("generate", "--gpu-memory-utilization", "foredraft serve sets it with --kv-memory"),
        ("serve", "--data-parallel-size", "one server for each device with CUDA_VISIBLE_DEVICES=N"),
        ("generate", "--pp-size", "--tensor-parallel-size splits one model over several"),
        ("generate", "--tp-size", "use --tensor-parallel-size"),
        ("train", "--tensor-parallel-size", "this command runs one model in one process"),
        ("generate", "--kv-cache-dtype", "use --kv-dtype"),
        ("generate", "--served-model-name", "an option of foredraft serve only"),
        ("generate", "--port", "an option of foredraft serve only"),
        ("generate", "--enable-prefix-caching", "prefixes are cached"),
        ("serve", "--enable-chunked-prefill", "always computed in chunks"),
        ("serve", "--max-logprobs", "up to 20 tokens"),
        ("generate", "--max-logprobs", "use --logprobs"),
        ("serve", "--seed", "a request sets its own seed"),
        ("generate", "--hf-token", "use HF_TOKEN=... in the environment"),
        ("serve", "--max_num_batched_token", "use --max-num-batched-tokens"),
        ("serve", "--speculative_config", "use --speculative-config"),
        ("serve", "--speculative-algorithm", "use --spec-method"),
        ("serve", "--speculative-num-steps", "use --spec-tokens"),
        ("generate", "--speculative-eagle-topk", "use --spec-option top_k=N"),
        ("generate", "--speculative-num-draft-tokens", "use --spec-option tree_nodes=N"),
        ("generate", "--speculative-draft-model-path", "use --spec-model"),
        ("chat", "--context-length", "use --max-model-len"),
        ("serve", "--mem-fraction-static", "use --kv-memory with a size"),
        ("serve", "--chunked-prefill-size", "use --max-chunk"),
        ("serve", "--tp", "use --tensor-parallel-size"),
    ],
)
def test_a_word_of_another_server_is_answered_with_the_way_here(run, command, option, answer):
    """Fault: `generate --gpu-memory-utilization` was answered with "unknown option" alone, and
    `--speculative-draft-model-path` with --num-speculative-tokens.
    """
    outcome = run(command, *(["text"] if command == "generate" else []), option, "1")
    assert (outcome.code, answer in outcome.error_lines[-1]) == (2, True), outcome.stderr


@pytest.mark.parametrize(
    ("command", "option", "answer"),
    [
        ("latency", "--spec-method", "use --methods METHOD"),
        ("latency", "--spec-tokens", "use --methods METHOD:TOKENS"),
        ("latency", "--spec-dtype", "use --methods METHOD:TOKENS:dtype=float32"),
        ("latency", "--spec-quantization", "use --methods METHOD:TOKENS:quantization=int8"),
        ("latency", "--spec-option", "use --methods METHOD:TOKENS:KEY=VALUE"),
        ("latency", "--posterior-threshold", "default thresholds in this command"),
        ("load", "--spec-method", "use --method METHOD"),
        ("compare", "--spec-method", "use --methods METHOD"),
    ],
)
def test_bench_names_its_own_word_for_the_method(run, command, option, answer):
    """Fault: `bench latency --spec-method` was answered with --spec-model."""
    assert answer in run("bench", command, option, "ngram").error_lines[-1]


def test_half_is_a_name_of_float16():
    """Fault: vLLM's `--dtype half` was an unknown dtype."""
    assert "half" in CliBackend().list_choices().dtypes
    assert parse_dtype("half") is torch.float16


def test_the_help_says_what_n_counts(run):
    shown = " ".join(run("generate", "--help", COLUMNS="200").stdout.split())
    assert "Number of outputs per prompt. The -n of llama.cpp is --max-tokens." in shown


def test_an_option_that_resembles_nothing_gets_no_guess(run):
    assert "; use" not in run("serve", "--xyzzy", "1").error_lines[-1]


def test_no_word_of_others_shadows_one_of_ours():
    ours = ["--kv-memory", "--max-batch", "--methods"]
    assert not set(FOREIGN_OPTIONS) & set(ours)
    assert suggest_option("--parallel", ours) == "--max-batch"
    assert suggest_option("--parallel", ["--other"]) is None
