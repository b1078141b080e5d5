"""Options of replicas, and the options of a server in a configuration of Ray Serve."""

import pickle
import sys

import pytest

from foredraft.cli.named_options import parse_named_options
from foredraft.cli.replicas import count_threads
from foredraft.cli.serve import ModelLoader, ServeOptions, resolve_options, serve
from foredraft.cli.shell import UsageError
from foredraft.engine.worker import WorkerLimits
from foredraft.errors import ForedraftError
from foredraft.ray_serve.spec import ReplicaSpec
from foredraft.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--replicas", "0"], "--replicas"),
        (["--max-replicas", "2"], "need --replicas"),
        (["--replica-load", "2"], "need --replicas"),
        (["--replicas", "3", "--max-replicas", "2"], "smaller than --replicas"),
        (["--replicas", "2", "--replica-load", "2"], "needs --max-replicas"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(run, args: list[str], words: str):
    done = run("serve", *args)
    assert (done.code, done.stdout, len(done.error_lines)) == (2, "", 1)
    assert words in done.stderr


def test_without_ray_there_is_a_command_to_run(run, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    done = run("serve", "--replicas", "2", "--port", "0")
    assert (done.code, len(done.error_lines)) == (1, 1)
    assert "pip install 'foredraft[ray]'" in done.stderr


def test_threads_are_given_or_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [count_threads(number) for number in (1, 3, 8, 20)] == [8, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert count_threads(8) == 5


def test_named_options_are_those_of_the_command_line():
    values = {
        "max-batch": 4,
        "max_queue": "7",
        "spec_option": ["a=1", "b=2"],
        "strict_max_tokens": True,
        "access_log": False,
        "api_key": None,
        "speculative_config": {"method": "ngram"},
        "drain_timeout": 1.5,
    }
    options = ServeOptions(**parse_named_options(serve, values))
    assert (options.max_batch, options.max_queue, options.spec_option) == (4, 7, ["a=1", "b=2"])
    assert (options.strict_max_tokens, options.access_log, options.api_key) == (True, False, None)
    assert (options.speculative_config, options.drain_timeout) == ('{"method": "ngram"}', 1.5)
    assert (options.port, options.replicas) == (ServeOptions.port, None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_bach": 4}, "unknown option --max-bach; use --max-batch"),
        ({"help": True}, "unknown option --help"),
        ({"max_batch": 0}, "--max-batch"),
        ({"max_batch": "many"}, "--max-batch"),
        ({"access_log": "yes"}, "--access-log"),
    ],
)
def test_named_options_are_checked(values: dict, words: str):
    with pytest.raises(UsageError, match=words):
        parse_named_options(serve, values)


def test_a_loader_can_be_sent_to_another_process():
    loader = ModelLoader(resolve_options(ServeOptions(replicas=2, max_batch=3)), "ngram", None)
    assert pickle.loads(pickle.dumps(loader)) == loader  # noqa: S301


def make_spec(least: int, most: int) -> ReplicaSpec:
    return ReplicaSpec(
        ServerSettings(), WorkerLimits(), ModelLoader(ServeOptions(), "none", None), "s", 2, 0, least, most
    )


def test_the_numbers_of_replicas_have_an_order():
    assert make_spec(2, 2).description == "2 replicas of 2 threads"
    assert make_spec(1, 4).description == "1 to 4 replicas of 2 threads"
    for numbers in ((0, 1), (3, 2)):
        with pytest.raises(ForedraftError, match="in this order"):
            make_spec(*numbers)
