"""Training of the target together with Medusa heads: weights of the losses, warm-up, LoRA, publication, resumption."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from foredraft import LLM, Sampling
from foredraft.checkpoints.read import find_named_target
from foredraft.checkpoints.target import read_target
from foredraft.checkpoints.target_reference import digest
from foredraft.drafters.checkpoint_folders import export, read
from foredraft.drafters.joint_training import JointTraining, LoraAdapters
from foredraft.drafters.losses import Losses
from foredraft.drafters.trainee import TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.train import trainable_target
from foredraft.train.config import EvaluationConfig
from foredraft.train.lora import add_adapters
from foredraft.train.optimizer import GroupedOptimizer, ParameterGroup
from foredraft.train.run import train
from foredraft.train.trace import Tracer
from foredraft.train.trainable_target import TrainableTarget
from foredraft.train.with_target import JointLoss
from tests.support import tiny_models
from tests.support.train_fakes import LinearTrainee, make_method, plan, weights, write_ids

FULL = {"heads": "2", "backbone": "0.5"}
LORA = FULL | {"lora_rank": "4", "own_head": "false"}
REPLAYED = {"evaluation": EvaluationConfig(prompts=3, tokens=16), "held_out_share": 0.2}
needs_peft = pytest.mark.skipif("not __import__('importlib.util').util.find_spec('peft')", reason="peft is missing")
KINDS = [pytest.param(FULL, id="full"), pytest.param(LORA, id="lora", marks=needs_peft)]


@pytest.fixture
def folder(tmp_path):
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    write_ids(tmp_path)
    return tmp_path


def run(folder, settings, out="out", **more):
    return train(replace(plan(folder, out, settings=settings, generate=False, **more), method="medusa"))


def read_model(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def find_changes(folder: Path, out: Path) -> set[str]:
    """Return the names of the target's tensors that training changed."""
    before, after = read_model(folder / "model"), read_model(out / "target")
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("settings", KINDS)
def test_a_run_that_was_stopped_ends_with_the_same_bits(folder, settings):
    whole = run(folder, settings, "whole").folder
    assert not run(folder, settings, "halves", max_steps=4).is_done
    torch.rand(7)  # something else uses the generator in between
    halves = run(folder, settings, "halves").folder
    for a, b in ((weights(whole), weights(halves)), (read_model(whole / "target"), read_model(halves / "target"))):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert find_changes(folder, whole)


@pytest.mark.parametrize("settings", KINDS)
def test_output_with_the_new_target_is_that_of_its_plain_decoding(folder, settings, caplog):
    made = run(folder, settings, learning_rate=0.05).folder
    prompts, sampling = [[5, 6, 7], [9, 10]], Sampling(max_tokens=24, temperature=0, ignore_eos=True)
    seeded = replace(sampling, temperature=1.0, seed=3)
    target, drafter = str(made / "target"), {"method": "medusa", "model": str(made)}
    for params in (sampling, seeded):
        drafted = LLM(target, drafter).generate(prompts, params)
        plain = LLM(target, None).generate(prompts, params)
        assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
        assert all(done.stats.num_drafted > 0 for done in drafted)
    original = LLM(str(folder / "model"), None).generate(prompts, sampling)
    assert [done.token_ids for done in original] != [
        done.token_ids for done in LLM(target, None).generate(prompts, sampling)
    ]
    assert not caplog.messages


@pytest.mark.parametrize("settings", KINDS)
def test_config_and_export_name_the_trained_target(folder, settings):
    made = run(folder, settings).folder
    assert find_named_target(made) == str(made / "target")
    target = read_target(find_named_target(made))
    said = export(read(made, target.info), "medusa", folder / "exported", target)
    if "own_head" in settings:  # vLLM loads no heads on the target's matrix, so there is no command
        assert said.command is None
    else:
        assert f"{made / 'target'}" in said.command
    exported = json.loads((folder / "exported" / "config.json").read_text())
    assert exported["foredraft_target"] == {"name": "target", "digest": digest(made / "target")}
    config = json.loads((made / "target" / "config.json").read_text())
    assert config == json.loads((folder / "model" / "config.json").read_text())


@pytest.mark.parametrize("settings", KINDS)
def test_a_run_reports_how_far_the_target_moved(folder, settings):
    metrics = run(folder, settings, learning_rate=0.05, **REPLAYED).eval_metrics
    assert metrics["target_kl"] > 1e-6
    assert metrics["target_ce"] > 0
    assert {"greedy", "sampled", "loss"} <= metrics.keys()
    still = run(folder, settings | {"backbone": "1e-12"}, "still", **REPLAYED).eval_metrics
    assert still["target_kl"] == pytest.approx(0, abs=1e-5)
    assert run(folder, {"heads": "2"}, "frozen", **REPLAYED).eval_metrics.keys() == {"greedy", "sampled", "loss"}


class ConstantTrainee(LinearTrainee):
    """Heads with a loss of 3 that reads the target's states."""

    def __init__(self):
        self.network = torch.nn.Linear(1, 1)
        self.spec = TraineeSpec((-1,))

    def compute_loss(self, trace):
        return Losses(3 + 0 * trace.features.sum(), {})


def make_joint_loss(folder, joint):
    llm = LLM(str(folder / "model"), None)
    trace = Tracer(llm.target, (-1,)).trace(torch.randint(4, 97, (2, 13)), torch.ones(2, 13, dtype=torch.bool))
    return JointLoss(ConstantTrainee(), TrainableTarget.from_model(llm.target, (-1,)), joint), trace


def test_the_loss_is_the_targets_and_the_weighted_loss_of_the_heads(folder):
    loss, trace = make_joint_loss(folder, JointTraining(0.5, "ce", heads_weight=0.25))
    ce = loss.target.measure([trace])["target_ce"]
    assert loss(trace, 0.2).total.item() == pytest.approx(ce + 0.75, abs=1e-4)
    assert loss(trace, 0.2).components["target"] == pytest.approx(ce, abs=1e-4)
    assert loss(trace, 0.19).total.item() == 3  # the heads alone
    kl = replace(loss, joint=JointTraining(0.5, "kl", heads_weight=2.0))
    assert kl(trace, 0.2).total.item() == pytest.approx(6, abs=1e-4)  # the target has not moved yet


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_target_stays_as_it_is_while_the_heads_warm_up(folder, optimizer):
    """Fault: weight decay, which Muon always has, shrank the target during the warm-up of the heads."""
    settings = FULL | {"backbone_warmup": "0.5"}
    more = {"optimizer": optimizer, "weight_decay": 0.1, "save_every": 1}
    assert not find_changes(folder, run(folder, settings, max_steps=3, **more).folder)
    assert find_changes(folder, run(folder, settings, max_steps=1, **more).folder)


def test_a_run_fitted_to_a_time_still_trains_the_target(folder):
    """Fault: the warm-up was counted in steps of the run before it was fitted, so it could last to the end."""
    ticks = iter(range(10**6))
    more = {"steps": 500, "max_minutes": 1.5, "save_every": 1000}
    made = train(
        replace(plan(folder, settings=FULL, generate=False, **more), method="medusa"), clock=lambda: float(next(ticks))
    )
    assert made.is_done
    assert made.steps < 100
    assert find_changes(folder, made.folder)


def test_groups_that_start_later_do_not_move_before():
    early, late = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    groups = [ParameterGroup.from_network(early), ParameterGroup.from_network(late, 0.5, start=0.4)]
    optimizer = GroupedOptimizer("adamw", groups, 0.1, weight_decay=0.5)
    for progress, moves in ((0.39, False), (0.4, True)):
        before = early.weight.clone(), late.weight.clone()
        for parameter in optimizer.parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(1.0, 1.0, progress)
        assert not torch.equal(before[0], early.weight)
        assert torch.equal(before[1], late.weight) is not moves


def test_the_loss_of_the_target_can_be_that_of_the_text(folder):
    by_text = run(folder, FULL | {"backbone_loss": "ce"}, "ce").folder
    by_target = run(folder, FULL, "kl").folder
    a, b = read_model(by_text / "target"), read_model(by_target / "target")
    assert any(not torch.equal(a[name], b[name]) for name in a)


def test_shared_output_matrices_need_a_target_whose_own_stays(folder):
    with pytest.raises(ForedraftError, match="use own_head, or lora_rank"):
        run(folder, FULL | {"own_head": "false"})
    shared = run(folder, {"heads": "2", "own_head": "false"}, "shared").folder
    with pytest.raises(ForedraftError, match="use own_head, or lora_rank"):
        run(folder, FULL, "again", start=str(shared))


def test_quantized_weights_are_not_trained(folder, monkeypatch):
    def load_quantized(name, dtype, device):
        model = tiny_models.llama()
        model.config.quantization_config = {"quant_method": "fp8"}
        return model

    llm = LLM(str(folder / "model"), None)
    monkeypatch.setattr(trainable_target, "load_model", load_quantized)
    with pytest.raises(ForedraftError, match="quantized and cannot be trained"):
        TrainableTarget.from_model(llm.target, (-1,))


def test_a_built_model_shares_nothing_that_learns_and_keeps_its_buffers(folder):
    """Fault: a copy in bfloat16 rounded the frequencies of the rotary positions."""
    target = TrainableTarget.from_model(LLM(str(folder / "model"), None).target, (-1,))
    model = target.build_model(torch.bfloat16)
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
    assert {x.dtype for x in model.buffers()} == {torch.float32}
    same = target.build_model(torch.float32)
    pairs = zip(target.model.parameters(), same.parameters(), strict=True)
    assert all(a.data_ptr() != b.data_ptr() and torch.equal(a, b) for a, b in pairs)
    assert target.model.training
    assert not model.training


@needs_peft
class TestLora:
    def test_only_the_layers_that_are_named_change(self, folder):
        made = run(folder, LORA | {"lora_modules": "q_proj,down_proj", "lora_alpha": "32"}).folder
        assert {name.split(".")[-2] for name in find_changes(folder, made)} == {"q_proj", "down_proj"}
        made = run(folder, LORA, "all").folder
        changes = find_changes(folder, made)
        assert {name.split(".")[-2] for name in changes} == set(
            "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
        )
        AutoModelForCausalLM.from_pretrained(made / "target")

    def test_a_checkpoint_holds_adapters_and_heads_alone(self, folder):
        made = run(folder, LORA, max_steps=4).folder
        saved = load_file(made / "checkpoint-4" / "weights.safetensors")
        of_target = {name for name in saved if name.startswith("target.") and "inv_freq" not in name}
        assert of_target
        assert all("lora_" in name for name in of_target)

    def test_gradients_reach_adapters_alone(self, folder):
        llm = LLM(str(folder / "model"), None)
        target = TrainableTarget.from_model(llm.target, (-1,), LoraAdapters(2, 4.0))
        logits, states = target.forward(torch.randint(4, 97, (2, 12)))
        (logits.sum() + states.sum()).backward()
        with_gradient = {name for name, x in target.model.named_parameters() if x.grad is not None}
        assert with_gradient == {name for name, _ in target.model.named_parameters() if "lora_" in name}

    def test_a_new_adapter_changes_nothing_and_a_merged_one_computes_the_same(self, folder):
        llm = LLM(str(folder / "model"), None)
        target = TrainableTarget.from_model(llm.target, (-1,), LoraAdapters(2, 4.0))
        tokens = torch.randint(4, 97, (2, 12))
        whole = TrainableTarget.from_model(llm.target, (-1,))
        assert torch.equal(target.forward(tokens)[0], whole.forward(tokens)[0])
        for name, parameter in target.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        before = {name: x.clone() for name, x in target.model.state_dict().items()}
        model = target.build_model(torch.float32)
        moved = target.forward(tokens)[0]
        assert not torch.allclose(moved, whole.forward(tokens)[0], atol=1e-2)
        assert torch.allclose(model(input_ids=tokens).logits, moved, atol=1e-4)
        assert model.state_dict().keys() == whole.model.state_dict().keys()
        assert all(torch.equal(x, before[name]) for name, x in target.model.state_dict().items())
        embeddings = [x.get_input_embeddings().weight.data_ptr() for x in (target.model, model)]
        assert embeddings[0] == embeddings[1]  # no second copy of frozen weights

    def test_a_transposed_matrix_is_merged_too(self, tmp_path):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=3, eos_token_id=3
        )
        GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
        write_ids(tmp_path)
        changes = find_changes(tmp_path, run(tmp_path, LORA, learning_rate=0.05).folder)
        assert {name.split(".")[-2] for name in changes} == {"c_attn", "c_proj", "c_fc"}

    @pytest.mark.parametrize("wrong", ["lm_head", "embed_tokens", "q_prj"])
    def test_a_layer_that_the_decoder_layers_lack_is_refused(self, folder, wrong):
        with pytest.raises(ForedraftError, match=f"named '{wrong}'; they have: down_proj, gate_proj, k_proj"):
            run(folder, LORA | {"lora_modules": f"q_proj,{wrong}"})

    def test_a_model_without_linear_layers_is_refused(self):
        model = tiny_models.llama()
        for layer in model.model.layers:
            layer.self_attn = layer.mlp = torch.nn.Identity()
        with pytest.raises(ForedraftError, match="have no linear layers for LoRA; leave lora_rank out"):
            add_adapters(model, LoraAdapters(2, 4.0), "this")

    def test_frozen_weights_are_kept_in_the_precision_of_training(self, folder):
        llm = LLM(str(folder / "model"), None)
        mixed = TrainableTarget.from_model(llm.target, (-1,), LoraAdapters(2, 4.0), is_mixed=True)
        dtypes = {"lora_" in name: x.dtype for name, x in mixed.model.named_parameters()}
        assert dtypes[False] == torch.bfloat16
        made = run(folder, LORA, precision="bf16", **REPLAYED)
        assert made.is_done
        assert find_changes(folder, made.folder)
        whole = TrainableTarget.from_model(llm.target, (-1,), is_mixed=True)
        assert {x.dtype for x in whole.model.parameters()} == {torch.float32}

    def test_any_method_that_declares_joint_training_has_adapters(self, folder):
        def create(config, target, start=None):
            trainee = LinearTrainee(config, target.hidden_size, target.vocab_size)
            trainee.spec = replace(trainee.spec, joint=JointTraining(0.5, lora=LoraAdapters(2, 4.0, ("v_proj",))))
            return trainee

        from tests.support.train_fakes import TrainConfig

        made = train(plan(folder, generate=False), method=make_method(TrainConfig, create))
        assert made.target == made.folder / "target"
        assert {name.split(".")[-2] for name in find_changes(folder, made.folder)} == {"v_proj"}
