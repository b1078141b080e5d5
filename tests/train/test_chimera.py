"""`foredraft train chimera`: it learns under every loss, goes on bit for bit, and what it writes drafts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foredraft import LLM, Sampling
from foredraft.drafters.losses import LOSS_NAMES
from foredraft.errors import ForedraftError
from foredraft.train.config import EvaluationConfig
from foredraft.train.run import TrainResult, train
from tests.support import tiny_models
from tests.support.train_fakes import plan, weights, write_ids

SETTINGS = {"taps": "[1, -1]", "heads": "2", "steps": "3", "intermediate": "24"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    write_ids(tmp_path)
    return tmp_path


def run(folder: Path, out: str = "out", **more: object) -> TrainResult:
    settings = SETTINGS | more.pop("settings", {})  # type: ignore[operator]
    return train(replace(plan(folder, out, settings=settings, **more), method="chimera"))


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_it_learns_under_every_loss(folder: Path, loss: str) -> None:
    outcome = run(folder, settings={"loss": loss}, steps=30, batch_tokens=128)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    found = [row["loss"] for row in rows if "loss" in row]
    assert found[-1] < found[0]
    assert {"loss_1", "loss_2", "loss_3"} <= rows[0].keys()


def test_a_stopped_run_goes_on_with_the_same_bits(folder: Path) -> None:
    whole = run(folder, "whole")
    run(folder, "halves", max_steps=3)
    halves = run(folder, "halves")
    a, b = weights(whole.folder), weights(halves.folder)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_what_was_trained_is_replayed_drafts_and_is_gone_on_from(folder: Path) -> None:
    evaluation = EvaluationConfig(prompts=4, tokens=24)
    first = run(folder, "first", steps=20, evaluation=evaluation, held_out_share=0.2)
    assert first.eval_metrics["greedy"]["length"] >= 1
    llm = LLM(str(folder / "model"), {"method": "chimera", "model": str(first.folder)})
    (done,) = llm.generate([[7, 11, 40]], Sampling(max_tokens=12, temperature=0, ignore_eos=True))
    assert done.stats.num_drafted > 0
    assert llm.engine.drafter.num_failures == 0
    second = run(folder, "second", start=str(first.folder), learning_rate=1e-9, steps=1)
    a, b = weights(first.folder), weights(second.folder)
    assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)


def test_other_heads_are_not_gone_on_from(folder: Path) -> None:
    eagle = train(replace(plan(folder, "eagle", settings={}, steps=1), method="eagle")).folder
    with pytest.raises(ForedraftError, match="holds an EAGLE head, not chimera"):
        run(folder, start=str(eagle))
