"""Training with a target on a server: the weights of a run with the target in its own process."""

from dataclasses import replace

import pytest
import torch

from foredraft import LLM
from foredraft.errors import ForedraftError
from foredraft.server.settings import ServerSettings
from foredraft.train.config import DataConfig, EvaluationConfig
from foredraft.train.run import train
from tests.support import tiny_models
from tests.support.server.live_server import run_server
from tests.support.train_fakes import plan, weights, write_ids

SETTINGS = {
    "draft_model": {"layers": "1", "hidden": "16"},
    "medusa": {"heads": "2"},
    "eagle3": {},
    "hydra": {},
    "blockwise": {},
    "mlp_speculator": {},
}


EVALUATION = EvaluationConfig(prompts=2, tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote") / "model"
    tiny_models.llama().float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(model):
    with run_server(LLM(str(model), None), ServerSettings(has_traces=True)) as server:
        yield server.url


def run(folder, model, method, **more):
    write_ids(folder)
    made = plan(folder, settings=SETTINGS.get(method), steps=3, held_out_share=0.2, evaluation=EVALUATION)
    return train(replace(made, method=method, model=str(model), out=folder / f"{method}-{len(more)}", **more))


@pytest.mark.parametrize("method", SETTINGS)
def test_the_weights_and_figures_are_those_of_a_local_target(method, model, url, tmp_path):
    """Faults: states of another layer or in another order, distributions cut, another dtype, losses that differ."""
    local, remote = run(tmp_path, model, method), run(tmp_path, model, method, target_url=url)
    a, b = weights(local.folder), weights(remote.folder)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert local.eval_metrics == remote.eval_metrics
    assert local.eval_metrics["greedy"]["length"] >= 1


def test_the_servers_target_writes_the_same_documents(model, url, tmp_path):
    data = DataConfig(files=(write_ids(tmp_path),), context=16, generate=True, written=8)
    for name, address in (("local", None), ("remote", url)):
        made = plan(tmp_path, out=name, settings={"heads": "1"}, steps=1)
        train(replace(made, method="medusa", model=str(model), data=data, target_url=address))
    texts = [(tmp_path / name / "generated.jsonl").read_text() for name in ("local", "remote")]
    assert texts[0] == texts[1]


def test_the_layers_of_the_target_are_not_loaded(model, url):
    from foredraft.train.remote.client import TargetClient
    from foredraft.train.remote.connection import connect_server
    from foredraft.train.remote.target import RemoteTarget

    target = RemoteTarget.load(str(model), "auto", torch.device("cpu"), connect_server(TargetClient(url)))
    loaded = [name for name, parameter in target.model.named_parameters() if parameter.device.type != "meta"]
    assert loaded
    assert not [name for name in loaded if "layers" in name]


def test_another_target_on_the_server_is_refused(url, tmp_path):
    tiny_models.llama(seed=9).float().save_pretrained(tmp_path / "other")
    with pytest.raises(ForedraftError, match=r"serves another target than .*: its sum is"):
        run(tmp_path, tmp_path / "other", "medusa", target_url=url)


def test_a_server_without_traces_is_refused(model, tmp_path):
    with run_server(LLM(str(model), None)) as server, pytest.raises(ForedraftError, match=r"refused the request .*404"):
        run(tmp_path, model, "medusa", target_url=server.url)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [("medusa", {"backbone": "0.1"}, "must be here, not on a server"), ("early_exit", {}, "needs the layers of")],
)
def test_methods_that_need_the_layers_are_refused(method, settings, message, model, url, tmp_path):
    write_ids(tmp_path)
    made = plan(tmp_path, settings=settings, steps=1, held_out_share=0.2, evaluation=EVALUATION)
    made = replace(made, method=method, model=str(model), target_url=url)
    with pytest.raises(ForedraftError, match=message):
        train(made)
