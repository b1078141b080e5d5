"""Training with hidden states from vLLM: a server that answers as it does, and what is refused."""

from dataclasses import replace

import pytest
import torch

from foredraft import LLM
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.train.config import DataConfig, EvaluationConfig
from foredraft.train.remote.client import TargetClient
from foredraft.train.remote.connection import connect_server
from foredraft.train.remote.target import RemoteTarget
from foredraft.train.remote.tracer import RemoteTracer
from foredraft.train.run import train
from foredraft.train.trace import Tracer
from tests.support import tiny_models
from tests.support.fake_vllm_server import run_fake_vllm
from tests.support.train_fakes import plan, write_ids

CPU = torch.device("cpu")
TOKENS = torch.tensor([[3, 5, 90, 17, 4], [8, 8, 1, 60, 96]])
LAYERS = (1, AFTER_FINAL_NORM, 0, 2)
EVALUATION = EvaluationConfig(prompts=2, tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm") / "model"
    tiny_models.llama().float().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with run_fake_vllm(model, tmp_path_factory.mktemp("states") / "layers-0-1-2", (0, 1, 2)) as fake:
        yield fake


@pytest.fixture
def vllm(server):
    """The server as it was at first, whatever a test changes."""
    fields = {name: getattr(server, name) for name in ("folder", "exports", "has_connector", "owner")}
    server.requests.clear()
    yield server
    for name, value in fields.items():
        setattr(server, name, value)


def load(model, vllm):
    return RemoteTarget.load(model, "auto", CPU, connect_server(TargetClient(vllm.url)))


def run(folder, model, method, settings, **more):
    """Train for three steps; return the losses of the steps and of the evaluation, and the acceptance."""
    write_ids(folder)
    losses = []
    made = plan(folder, settings=settings, steps=3, held_out_share=0.2, evaluation=EVALUATION)
    made = replace(made, method=method, model=model, out=folder / f"{method}-{len(more)}", **more)
    metrics = train(made, on_step=lambda status: losses.append(status.loss)).eval_metrics
    return [*losses, metrics["loss"]], metrics["greedy"]


@pytest.mark.parametrize("top", [None, 7])
def test_states_and_distributions_are_those_of_a_local_target(model, vllm, top):
    """Faults: layers in another order, the norm twice or never, p of the token before."""
    remote = RemoteTracer(load(model, vllm), LAYERS, top).run_target(TOKENS)
    local = Tracer(LLM(model, None).target, LAYERS, top).run_target(TOKENS)
    assert torch.allclose(remote[0], local[0], atol=1e-4)
    assert torch.allclose(remote[1].logprobs, local[1].logprobs, atol=1e-4)
    assert top is None or torch.equal(remote[1].token_ids, local[1].token_ids)


def test_no_layers_are_needed_for_the_distributions(model, vllm):
    features, probs = RemoteTracer(load(model, vllm)).run_target(TOKENS)
    assert (features.shape, probs.logprobs.shape) == ((2, 5, 0), (2, 5, 97))


@pytest.mark.parametrize(
    ("method", "settings"),
    [("eagle3", {"taps": "1"}), ("medusa", {"heads": "2"}), ("draft_model", {"layers": "1"})],
)
def test_a_run_learns_the_same_as_with_a_local_target_and_leaves_no_file(method, settings, model, vllm, tmp_path):
    losses, acceptance = run(tmp_path, model, method, settings, target_url=vllm.url)
    own_losses, own_acceptance = run(tmp_path, model, method, settings)
    assert losses == pytest.approx(own_losses, abs=1e-3)
    assert acceptance == own_acceptance
    assert not list(vllm.folder.iterdir())


def test_the_servers_target_writes_the_documents(model, vllm, tmp_path):
    data = DataConfig(files=(write_ids(tmp_path),), context=16, generate=True, written=8)
    for name, address in (("local", None), ("remote", vllm.url)):
        made = plan(tmp_path, out=name, settings={"heads": "1"}, steps=1)
        train(replace(made, method="medusa", model=model, data=data, target_url=address))
    texts = [(tmp_path / name / "generated.jsonl").read_text() for name in ("local", "remote")]
    assert texts[0] == texts[1]
    assert not list(vllm.folder.iterdir())


def test_a_row_leaves_room_for_the_token_that_vllm_generates(model, vllm, tmp_path):
    assert load(model, vllm).context_length == 63
    data = DataConfig(files=(write_ids(tmp_path),), context=64)
    with pytest.raises(ForedraftError, match="--context 64 is longer than the 63 tokens"):
        train(replace(plan(tmp_path), method="medusa", model=model, data=data, target_url=vllm.url))


def test_a_layer_that_is_not_exported_is_answered_with_the_command(model, vllm):
    target = load(model, vllm)
    vllm.folder, vllm.exports = vllm.folder.with_name("layers-1-2"), (1, 2)
    with pytest.raises(ForedraftError, match=r"exports the layers 1, 2, and this run also reads 0; start it as: ") as e:
        target.fetch_traces(TOKENS, (0, 2), None)
    assert f'vllm serve {model} --speculative-config \'{{"method": "extract_hidden_states"' in str(e.value)
    assert '"eagle_aux_hidden_state_layer_ids": [0, 2]' in str(e.value)
    assert f'"shared_storage_path": "{vllm.folder.with_name("layers-0-2")}"' in str(e.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"has_connector": False}, r"writes no hidden states; start it as: vllm serve"),
        ({"owner": "sglang"}, r"neither of Foredraft nor of vLLM \(its model belongs to 'sglang'\)"),
        ({"exports": (1, 2)}, r"shape \[16, 2, 32\] instead of \[16, 3, 32\]; it has another target, or other layers"),
        ({"exports": (0, 2, 1)}, r"serves another target than .* differ by"),
    ],
)
def test_a_server_that_exports_something_else_is_refused(change, message, model, vllm):
    for name, value in change.items():
        setattr(vllm, name, value)
    with pytest.raises(ForedraftError, match=message):
        load(model, vllm)


def test_a_folder_without_layers_in_its_name_is_refused_and_its_file_stays(model, vllm, tmp_path):
    vllm.folder = tmp_path / "states"
    with pytest.raises(ForedraftError, match=r"writes to .*states, whose name has no layers; start it as"):
        load(model, vllm)
    assert list(vllm.folder.glob("*.lock"))


def test_another_target_is_refused(vllm, tmp_path):
    tiny_models.llama(seed=9).float().save_pretrained(tmp_path / "other")
    with pytest.raises(ForedraftError, match=r"serves another target than .*other: .* differ by"):
        load(str(tmp_path / "other"), vllm)
