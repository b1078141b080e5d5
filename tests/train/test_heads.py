"""Blockwise and Hydra heads, trained from a plan to a folder that drafts."""

import json
from dataclasses import replace

import pytest
import torch

from foredraft import LLM, Sampling
from foredraft.checkpoints.read import find_named_target
from foredraft.checkpoints.target import read_target
from foredraft.drafters.checkpoint_folders import export, read
from foredraft.drafters.common import mismatch_warning
from foredraft.drafters.losses import LOSS_NAMES
from foredraft.errors import ForedraftError
from foredraft.train.config import EvaluationConfig
from foredraft.train.run import train
from tests.support import tiny_models
from tests.support.train_fakes import plan, weights, write_ids

SMALL = {
    "blockwise": {"heads": "3", "inner": "8"},
    "hydra": {"heads": "3", "own_head": "false", "rank": "12"},
}
RECIPES = [
    ("blockwise", {}),
    ("blockwise", {"heads_per_step": "one"}),
    ("hydra", {}),
    ("hydra", {"own_head": "true", "rank": "None", "layers": "2"}),
    ("hydra", {"prefix": "true"}),
]


@pytest.fixture
def folder(tmp_path):
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    write_ids(tmp_path)
    return tmp_path


def run(folder, method, settings, **more):
    return train(replace(plan(folder, settings=SMALL[method] | settings, **more), method=method))


@pytest.mark.parametrize(("method", "settings"), RECIPES)
def test_a_run_that_was_stopped_ends_with_the_same_bits(folder, method, settings):
    whole = run(folder, method, settings, out="whole")
    assert not run(folder, method, settings, out="halves", max_steps=3).is_done
    torch.rand(7)  # something else uses the generator in between
    halves = run(folder, method, settings, out="halves")
    a, b = weights(whole.folder), weights(halves.folder)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("loss", LOSS_NAMES)
@pytest.mark.parametrize("method", SMALL)
def test_heads_learn_under_every_loss_and_draft(folder, method, loss):
    asked = {"evaluation": EvaluationConfig(prompts=3, tokens=16), "held_out_share": 0.2}
    outcome = run(folder, method, {"loss": loss}, steps=30, batch_tokens=128, **asked)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    found = [row["loss"] for row in rows if "loss" in row]
    assert found[-1] < found[0]
    assert {"greedy", "sampled"} <= outcome.eval_metrics.keys()
    llm = LLM(str(folder / "model"), {"method": method, "model": str(outcome.folder)})
    (done,) = llm.generate([[5, 6, 7]], Sampling(max_tokens=12, temperature=0, ignore_eos=True))
    assert done.stats.num_drafted > 0


def test_the_evaluation_of_a_weak_head_logs_no_misfit(folder, monkeypatch, caplog):
    """Fault: the trainer checked the target of its own head, which lay in the evaluation's temporary folder."""
    monkeypatch.setattr(mismatch_warning, "is_near_chance", lambda drafts, accepted: drafts >= 8)  # whatever the head
    asked = {"evaluation": EvaluationConfig(prompts=3, tokens=16), "held_out_share": 0.2}
    made = run(folder, "hydra", {}, **asked).folder
    assert not [message for message in caplog.messages if "almost never accepted" in message]
    llm = LLM(str(folder / "model"), {"method": "hydra", "model": str(made)}, num_speculative_tokens=2)
    llm.generate([[5, 6, 7]], Sampling(max_tokens=40, temperature=0, ignore_eos=True))
    assert "almost never accepted" in caplog.text


@pytest.mark.parametrize("method", SMALL)
def test_heads_go_on_from_others(folder, method):
    first = run(folder, method, {}, out="first").folder
    second = run(folder, method, {}, out="second", start=str(first), learning_rate=1e-9, steps=1).folder
    a, b = weights(first), weights(second)
    assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)


def test_heads_do_not_go_on_from_a_whole_model(folder):
    """Guards an AttributeError: the folder of a model has no shape of heads."""
    with pytest.raises(ForedraftError, match="holds a whole language model, not hydra"):
        run(folder, "hydra", {}, start=str(folder / "model"))


def test_an_unknown_setting_is_answered_with_the_known_ones(folder):
    with pytest.raises(ForedraftError, match=r"heads_per_step.*inner"):
        run(folder, "blockwise", {"layers": "2"})
    with pytest.raises(ForedraftError, match=r"own_head.*rank"):
        run(folder, "hydra", {"inner": "2"})


def test_heads_name_the_target_that_learnt_with_them(folder, caplog):
    """Guards Medusa-2 heads whose config and hand-over named the target that they were not trained for."""
    settings = {"heads": "2", "backbone": "0.1"}
    made = train(replace(plan(folder, settings=settings, steps=4, generate=False), method="medusa")).folder
    own = str(made / "target")
    assert json.loads((made / "config.json").read_text())["base_model_name_or_path"] == "target"
    assert find_named_target(made) == own
    moved = made.rename(folder / "moved")
    assert find_named_target(moved) == str(moved / "target")
    target = read_target(find_named_target(moved))
    said = export(read(moved, target.info), "vllm", folder / "out", target)
    assert said.command.startswith(f"vllm serve {moved / 'target'} ")
    drafter = {"method": "medusa", "model": str(moved)}
    LLM(str(moved / "target"), drafter)
    assert not caplog.messages
    LLM(str(folder / "model"), drafter)
    assert "was trained together with the target in" in caplog.text


def test_heads_of_another_target_of_the_same_size_are_noticed_when_they_are_loaded(folder, caplog):
    made = run(folder, "blockwise", {}, steps=1).folder
    drafter = {"method": "blockwise", "model": str(made)}
    LLM(str(folder / "model"), drafter)
    LLM(str(folder / "model"), drafter, dtype="bfloat16")
    assert not caplog.messages
    tiny_models.llama(seed=5).float().save_pretrained(folder / "other")
    LLM(str(folder / "other"), drafter)
    assert f"was trained for model, not for {folder / 'other'}" in caplog.text


STARTS = [
    ("eagle", {}, {"num_layers": "2"}),
    ("eagle", {}, {"has_fc_bias": "true"}),
    ("eagle3", {"taps": "1"}, {"num_layers": "2"}),
    ("medusa", {"heads": "2"}, {"heads": "3"}),
    ("hydra", {"heads": "2", "rank": "8"}, {"rank": "None"}),
    ("mlp_speculator", {"inner": "8"}, {"n_predict": "2"}),
    ("mlp_speculator", {"inner": "8", "cell": "lstm"}, {"cell": "layer"}),
    ("blockwise", {"heads": "2", "inner": "8"}, {"inner": "4"}),
    ("chimera", {"heads": "2", "intermediate": "16"}, {"taps": "1"}),
    ("draft_model", {"layers": "1"}, {"layers": "2"}),
]


@pytest.mark.parametrize(("method", "settings", "other"), STARTS)
def test_a_size_other_than_that_of_the_start_is_refused(folder, method, settings, other):
    """Fault: `--start` ignored `--set num_layers=2` and all other sizes, and trained a head of the old size."""
    first = train(replace(plan(folder, "first", settings=settings, steps=1), method=method)).folder
    again = {"start": str(first), "steps": 1}
    (name,) = other
    with pytest.raises(ForedraftError, match=f"has {name}=.*leave --set {name} out"):
        train(replace(plan(folder, "other", settings=settings | other, **again), method=method))
    assert train(replace(plan(folder, "equal", settings=settings, **again), method=method)).is_done


def test_a_table_of_counts_takes_no_start(folder):
    with pytest.raises(ForedraftError, match="leave --start out"):
        train(replace(plan(folder, settings={}, start="anything"), method="ngram_lm"))
