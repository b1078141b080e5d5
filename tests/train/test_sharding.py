"""Weights that are shared out over two processes by FSDP2: losses, weights and figures of whole weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from foredraft import LLM, Sampling
from foredraft.drafters.losses import Losses
from foredraft.errors import ForedraftError
from foredraft.models.hidden_states import find_decoder_layers
from foredraft.train.distributed import DistributedContext, close_processes
from foredraft.train.placement import ShardedWeights
from foredraft.train.run import train
from foredraft.train.settings import list_trainable_methods
from foredraft.train.sharded_target import load_sharded_target
from foredraft.train.sharding_settings import ShardingSettings
from tests.support import tiny_models, tiny_seq2seq
from tests.support.train_fakes import LINEAR, plan, write_ids

SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
SETTINGS = {
    "blockwise": {"heads": "3", "inner": "8"},
    "draft_model": {"hidden": "16", "layers": "1"},
    "hydra": {"heads": "3", "rank": "12"},
    "medusa": {"heads": "2"},
    "mlp_speculator": {"inner": "16", "n_predict": "2"},
}
COUNTING = {"ngram_lm"}  # methods without weights
TRAINABLE = sorted(list_trainable_methods().keys() - COUNTING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharding")
    tiny_models.llama().float().save_pretrained(folder / "model")
    write_ids(folder)
    return folder


def launch(folder, out, *plans, **environment):
    """Run plans in two processes; each is (method, settings of the method, changes of the plan)."""
    command = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "tests.support.train_processes"]
    places = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *command, str(folder), out, json.dumps(plans)], check=False, capture_output=True, text=True,
        cwd=folder, env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def read_metrics(folder):
    """Losses, gradient norms and figures of a run, without its speed."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row | {"tokens_per_second": 0} for row in rows]


def run_sharded_and_whole(folder, name, *plans):
    """Run plans in two processes, with sharded and with whole weights. Returns both folders."""
    folders = folder / f"{name}-sharded", folder / f"{name}-whole"
    for out, environment in zip(folders, (SHARDED, {}), strict=True):
        result = launch(folder, out.name, *plans, **environment)
        assert result.returncode == 0, result.stderr
    return folders


def compare(ours, reference):
    """Assert equal losses, figures and weights, bit by bit."""
    assert read_metrics(ours) == read_metrics(reference)
    a, b = (load_file(path / "model.safetensors") for path in (ours, reference))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_losses_weights_and_figures_are_those_of_whole_weights(folder):
    """Sums over parts of a step and over the squares of all gradients are in another order, hence a tolerance there.

    The run of the draft model is stopped after two steps, and goes on from its checkpoint.
    """
    draft = SETTINGS["draft_model"]
    plans = (
        ("eagle3", {}, {}), ("draft_model", draft, {"max_steps": 2}), ("draft_model", draft, {}),
        ("hydra", SETTINGS["hydra"], {"parts": 2, "clip": 0.1}),
    )  # fmt: skip
    sharded, whole = run_sharded_and_whole(folder, "two", *plans)
    compare(sharded / "eagle3", whole / "eagle3")
    compare(sharded / "draft_model", whole / "draft_model")
    a, b = (load_file(out / "hydra" / "model.safetensors") for out in (sharded, whole))
    assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in b)


@pytest.mark.soak
@pytest.mark.parametrize("method", TRAINABLE)
def test_every_method_learns_the_same(folder, method):
    sharded, whole = run_sharded_and_whole(folder, f"one-{method}", (method, SETTINGS.get(method, {}), {}))
    compare(sharded / method, whole / method)


@pytest.mark.soak
def test_a_checkpoint_of_sharded_weights_goes_on_with_whole_ones(folder):
    draft = SETTINGS["draft_model"]
    for plan_changes, environment in (({"max_steps": 2}, SHARDED), ({}, {})):
        result = launch(folder, "mixed", ("draft_model", draft, plan_changes), **environment)
        assert result.returncode == 0, result.stderr
    result = launch(folder, "unbroken", ("draft_model", draft, {}))
    assert result.returncode == 0, result.stderr
    compare(folder / "mixed" / "draft_model", folder / "unbroken" / "draft_model")


@pytest.mark.soak
def test_a_sharded_target_writes_the_same_texts(folder):
    """Every process generates them, and one writes them down."""
    changes = {"generate": True, "written": 12, "opening": 8}
    sharded, whole = run_sharded_and_whole(folder, "texts", ("draft_model", SETTINGS["draft_model"], changes))
    texts = [(out / "draft_model" / "generated.jsonl").read_text() for out in (sharded, whole)]
    assert texts[0] == texts[1]
    compare(sharded / "draft_model", whole / "draft_model")


@pytest.fixture
def context():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield DistributedContext(torch.device("cpu"))
    torch.distributed.destroy_process_group()


def test_connections_end_with_the_run():
    """Fault: a process of several aborted now and then at its exit, after the run had ended well."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    close_processes()
    assert not torch.distributed.is_initialized()
    close_processes()


def test_the_layers_of_a_target_are_sharded_and_its_tables_are_whole(folder, context):
    llm = load_sharded_target(str(folder / "model"), "auto", context, ShardingSettings())
    model = llm.target.model
    assert all(isinstance(parameter, DTensor) for parameter in find_decoder_layers(model).parameters())
    assert not isinstance(llm.target.embedding, DTensor)
    assert not isinstance(llm.target.head_weight, DTensor)
    greedy = Sampling(max_tokens=8, temperature=0)
    plain = LLM(str(folder / "model"), None, fused=False)
    assert llm.generate([[5, 9]], greedy)[0].token_ids == plain.generate([[5, 9]], greedy)[0].token_ids


def test_an_encoder_decoder_target_is_refused(tmp_path, context):
    tiny_seq2seq.t5().save_pretrained(tmp_path)
    with pytest.raises(ForedraftError, match="encoder-decoder model, which is not sharded; launch without --use_fsdp"):
        load_sharded_target(str(tmp_path), "auto", context, ShardingSettings())


def test_whole_weights_are_there_in_the_block_alone(context):
    network = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    network[1].requires_grad_(False)
    original = {name: tensor.clone() for name, tensor in network.state_dict().items()}

    def compute_loss(trace, progress):
        return Losses(network(trace).sum(), {"half": 0.5})

    weights = ShardedWeights.shard(network, compute_loss, context, ShardingSettings())
    assert isinstance(network[0].weight, DTensor)
    assert not isinstance(network[1].weight, DTensor)
    losses = weights.compute_loss(torch.ones(1, 3), 0.0)
    losses.total.backward()
    assert losses.components == {"half": 0.5}
    with weights.gather():
        found = network.state_dict()
        assert not any(isinstance(tensor, DTensor) for tensor in found.values())
        assert all(torch.equal(found[name], original[name]) for name in original)
    assert isinstance(network[0].weight, DTensor)
    assert network[0].weight.grad.full_tensor().abs().sum() > 0


def test_a_parameter_without_a_gradient_gets_zeros(context):
    """Else a process would sum other gradients than the others, which ends in a crash of gloo, or in wrong sums."""
    network = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    weights = ShardedWeights.shard(
        network, lambda trace, progress: Losses(network[0](trace).sum(), {}), context, ShardingSettings()
    )
    weights.compute_loss(torch.ones(1, 3), 0.0).total.backward()
    assert torch.equal(network[1].weight.grad.full_tensor(), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FSDP_VERSION": "1"}, "launch with --fsdp_version 2"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "launch without --fsdp_activation_checkpointing"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "launch without --fsdp_offload_params"),
    ],
)
def test_other_kinds_of_sharding_are_refused(environment, message, monkeypatch):
    for name, value in (SHARDED | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ForedraftError, match=message):
        ShardingSettings.detect(2)


def test_one_process_has_all_weights(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert ShardingSettings.detect(1) is None


def test_the_launcher_chooses_when_weights_are_freed(monkeypatch):
    assert ShardingSettings.detect(2) is None
    for name, value in (SHARDED | {"FSDP_RESHARD_AFTER_FORWARD": "false"}).items():
        monkeypatch.setenv(name, value)
    assert ShardingSettings.detect(2) == ShardingSettings(frees_after_forward=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"optimizer": "muon"}, "give --optimizer adamw"), ({"cache": "traces"}, "leave --cache out")],
)
def test_what_needs_whole_weights_is_refused(folder, changes, message, monkeypatch):
    several = DistributedContext(torch.device("cpu"), num_processes=2, sharding=ShardingSettings())
    monkeypatch.setattr(DistributedContext, "detect", lambda device, precision: several)
    with pytest.raises(ForedraftError, match=message):
        train(plan(folder, **changes), method=LINEAR)
