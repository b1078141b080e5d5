"""The public names and signatures, written down once more: a change here breaks users."""

import inspect
import subprocess
import sys
import tomllib
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest

import foredraft

NAMES = [
    "LLM",
    "Completion",
    "Delta",
    "ForedraftError",
    "Grammar",
    "ImagePrompt",
    "MemoryLimits",
    "RequestOptions",
    "Sampling",
    "Seq2Seq",
    "Stats",
    "TokenLogprob",
    "distribution",
    "generate",
    "make_typical_rule",
    "simulate_acceptance",
    "speculate",
]


def test_the_names_are_these_and_sorted():
    assert foredraft.__all__ == NAMES
    # constants, then classes, then functions, as the linter sorts
    assert sorted(NAMES, key=lambda n: (not n.isupper(), n.islower(), n)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_and_documented(name):
    assert inspect.getdoc(getattr(foredraft, name))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="LLLM"):
        foredraft.LLLM  # noqa: B018


def test_the_version_is_the_same_everywhere():
    assert foredraft.__version__ == metadata.version("foredraft")
    project = Path(__file__).parent.parent / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == foredraft.__version__


def test_errors_are_value_errors():
    assert issubclass(foredraft.ForedraftError, ValueError)


def test_the_names_and_defaults_of_sampling():
    found = {spec.name: getattr(foredraft.Sampling(), spec.name) for spec in fields(foredraft.Sampling)}
    assert found == {
        "max_tokens": 128,
        "min_tokens": 0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "bad_words": (),
        "allowed_token_ids": None,
        "seed": None,
        "n": 1,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "grammar": None,
        "logits_processors": (),
    }


def test_what_a_completion_holds():
    completion = foredraft.Completion("a", [1], "stop")
    for name in ("text", "token_ids", "finish_reason", "logprobs", "stats"):
        assert hasattr(completion, name)
    for name in ("acceptance_length", "acceptance_rate", "per_position", "target_passes", "draft_time", "wall_time"):
        assert hasattr(completion.stats, name)


def test_the_arguments_of_the_front_door():
    parameters = list(inspect.signature(foredraft.LLM).parameters)
    assert parameters[:2] == ["model", "drafter"]
    for method in ("generate", "stream", "chat", "agenerate", "astream"):
        parameters_of = inspect.signature(getattr(foredraft.LLM, method)).parameters
        assert parameters_of["options"].kind is inspect.Parameter.KEYWORD_ONLY
    assert [spec.name for spec in fields(foredraft.RequestOptions)] == [
        "priority",
        "num_speculative_tokens",
        "prediction",
        "salt",
        "is_traced",
        "verify",
        "skip_special_tokens",
        "shown_tokens",
        "adapter",
    ]
    assert list(inspect.signature(foredraft.simulate_acceptance).parameters) == ["acceptance_rate", "cost_ms"]
    assert list(inspect.signature(foredraft.make_typical_rule).parameters) == ["posterior_threshold", "posterior_alpha"]
    assert {"dtype", "device", "verify", "num_speculative_tokens", "tokenizer"} <= set(parameters)
    for method in ("generate", "stream", "with_drafter", "tokenizer", "num_parameters", "drafter_name"):
        assert hasattr(foredraft.LLM, method) or method == "tokenizer"


def test_no_public_name_is_shadowed_by_a_module() -> None:
    """An imported submodule becomes an attribute of the package, and then answers to the name."""
    for name in foredraft.__all__:
        getattr(foredraft, name)
    assert not [name for name in foredraft.__all__ if inspect.ismodule(getattr(foredraft, name))]


def test_completion_offers_every_public_name_before_any_is_imported():
    """Fault: dir(foredraft) was ['Any', 'TYPE_CHECKING'], so that IPython completed nothing."""
    done = subprocess.run(
        [sys.executable, "-c", "import foredraft; print(*dir(foredraft))"], capture_output=True, text=True
    )
    assert set(NAMES) <= set(done.stdout.split())


def test_type_checkers_find_the_annotations():
    assert (Path(foredraft.__file__).parent / "py.typed").exists()
