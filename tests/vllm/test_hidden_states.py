"""Training with hidden states from vLLM itself, on a small Llama in float32.

The server starts by the command that `--print-server-command` prints, in about a minute.
"""

import shlex
from dataclasses import replace

import pytest
import torch

from foredraft import LLM, Sampling
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.train.config import EvaluationConfig
from foredraft.train.remote.client import TargetClient
from foredraft.train.remote.connection import connect_server
from foredraft.train.remote.target import RemoteTarget
from foredraft.train.remote.tracer import RemoteTracer
from foredraft.train.run import train
from foredraft.train.server_command import make_server_command
from foredraft.train.trace import Tracer
from tests.support import tiny_models
from tests.support.train_fakes import plan, write_ids
from tests.support.vllm_process import needs_vllm
from tests.support.vllm_server import run_vllm_server

pytestmark = needs_vllm
CPU = torch.device("cpu")
LAYERS = (1, AFTER_FINAL_NORM, 2)
TAPS = {"taps": "1"}
VOCAB = 320  # of the tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm") / "model"
    network = tiny_models.llama(VOCAB, hidden=128).float()  # heads of width 32, the least of vLLM on CPU
    network.generation_config.update(do_sample=True, top_k=2)  # vLLM's defaults for requests that have no top_k
    network.save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def url(model, states, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    run_plan = replace(plan(folder, settings=TAPS), method="eagle3", model=model)
    program, verb, *options = shlex.split(make_server_command(run_plan, states))
    assert (program, verb) == ("vllm", "serve")
    with run_vllm_server(options, folder / "vllm.log") as address:
        yield address


@pytest.fixture(scope="module")
def target(model, url):
    return RemoteTarget.load(model, "auto", CPU, connect_server(TargetClient(url)))


def test_states_and_distributions_are_those_of_a_local_target(model, target, states):
    """Both within 1e-4; states by the largest number of their layer, since a residual stream grows to hundreds."""
    tokens = torch.randint(4, VOCAB, (4, 200), generator=torch.Generator().manual_seed(0))
    local = Tracer(LLM(model, None).target, LAYERS).run_target(tokens)
    for _ in range(2):  # the second time vLLM has the beginnings in its prefix cache
        remote = RemoteTracer(target, LAYERS).run_target(tokens)
        here, there = (features.unflatten(-1, (len(LAYERS), -1)) for features in (local[0], remote[0]))
        by_layer = (there - here).abs().amax((0, 1, 3)) / here.abs().amax((0, 1, 3))
        of_probs = float((remote[1].logprobs.exp() - local[1].logprobs.exp()).abs().max())
        print("largest differences of states by layer and of probabilities:", by_layer.tolist(), of_probs)
        assert max(float(by_layer.max()), of_probs) < 1e-4
    assert not list(states.glob("*/*"))


@pytest.mark.parametrize(
    ("method", "settings"), [("eagle3", TAPS), ("medusa", {"heads": "2"}), ("draft_model", {"layers": "1"})]
)
def test_the_losses_are_those_of_a_local_target(method, settings, model, url, states, tmp_path):
    write_ids(tmp_path, vocab_size=VOCAB)
    losses, evaluations = {}, {}
    for name, address in (("local", None), ("vllm", url)):
        steps = losses.setdefault(name, [])
        made = plan(tmp_path, name, settings, held_out_share=0.2, evaluation=EvaluationConfig(prompts=2, tokens=8))
        made = replace(made, method=method, model=model, target_url=address)
        evaluations[name] = train(made, on_step=lambda status, steps=steps: steps.append(status.loss)).eval_metrics
    print(losses, evaluations)
    assert losses["vllm"] == pytest.approx(losses["local"], abs=1e-3)
    assert evaluations["vllm"]["loss"] == pytest.approx(evaluations["local"]["loss"], abs=1e-3)
    assert evaluations["vllm"]["greedy"] == evaluations["local"]["greedy"]
    assert not list(states.glob("*/*"))


def test_texts_are_those_of_a_local_target(model, target):
    prompts = [[5, 90, 17, 4], [8, 8, 1, 60, 96, 201]]
    sampling = Sampling(max_tokens=40, temperature=0)
    local = LLM(model, None).generate(prompts, sampling)
    served = [target.server.complete(prompt, sampling) for prompt in prompts]
    assert [one.token_ids for one in served] == [list(one.token_ids) for one in local]
    assert [one.text for one in served] == [one.text for one in local]


def test_sampled_texts_have_the_distribution_of_the_target(model, target):
    """Fault: the model's generation_config cuts the distribution. A first token is sampled 400 times."""
    counts = torch.zeros(VOCAB)
    for seed in range(400):
        counts[target.server.complete([5, 90, 17], Sampling(max_tokens=1, temperature=1, seed=seed)).token_ids[0]] += 1
    probs = Tracer(LLM(model, None).target).run_target(torch.tensor([[5, 90, 17]]))[1].logprobs[0, -1].exp()
    distance = float((counts / 400 - probs).abs().sum() / 2)
    expected = float((probs * (1 - probs) / 400).sqrt().sum() * 0.4)  # half of the mean absolute deviation, 0.8 sigma
    assert float(probs.topk(2).values.sum()) < 1 - 1.5 * expected
    print("distance", distance, "expected", expected)
    assert distance < 1.5 * expected


def test_another_target_and_absent_layers_are_refused(model, target, tmp_path):
    tiny_models.llama(VOCAB, hidden=128, seed=9).float().save_pretrained(tmp_path / "other")
    with pytest.raises(ForedraftError, match=r"serves another target than .*other"):
        RemoteTarget.load(str(tmp_path / "other"), "auto", CPU, target.server)
    with pytest.raises(ForedraftError, match=r"exports the layers 1, 2, and this run also reads 0; start it as: vllm"):
        target.fetch_traces(torch.tensor([[5, 90, 17]]), (0,), None)
