"""Runs from a plan to a folder: the same bits with and without a stop, and what refuses to go on."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foredraft.errors import ForedraftError
from foredraft.train.run import train
from tests.support import tiny_models
from tests.support.train_fakes import LINEAR, plan, weights, write_ids


@pytest.fixture
def folder(tmp_path):
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    write_ids(tmp_path)
    return tmp_path


def entries(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_run_that_was_stopped_ends_with_the_same_bits(folder, optimizer, parts):
    # dropout uses random numbers in every step: a resumed run must use those of its step
    same = {"settings": {"dropout": "0.3"}, "optimizer": optimizer, "parts": parts}
    whole = train(plan(folder, "whole", **same), method=LINEAR)
    first = train(plan(folder, "halves", max_steps=3, **same), method=LINEAR)
    torch.rand(7)  # something else uses the generator in between
    second = train(plan(folder, "halves", **same), method=LINEAR)
    assert (first.is_done, first.step, second.is_done, second.step) == (False, 3, True, 6)
    a, b = weights(whole.folder), weights(second.folder)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    drop = ("tokens_per_second",)
    strip = [[{k: v for k, v in e.items() if k not in drop} for e in entries(o.folder)] for o in (whole, second)]
    assert strip[0] == strip[1]


def test_training_lowers_the_loss(folder):
    out = train(plan(folder, steps=60), method=LINEAR).folder
    found = [entry["loss"] for entry in entries(out) if "loss" in entry]
    assert found[-1] < 0.95 * found[0]


def test_gradients_of_parts_add_up_to_those_of_the_whole_batch(folder):
    # rows of different fill: a part with fewer tokens to learn counts less
    one = weights(train(plan(folder, "one", steps=1), method=LINEAR).folder)
    two = weights(train(plan(folder, "two", steps=1, parts=2), method=LINEAR).folder)
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_and_leaves_a_drafter(folder, number):
    def interrupt(standing):
        if standing.step == 2:
            os.kill(os.getpid(), number)

    outcome = train(plan(folder), on_step=interrupt, method=LINEAR)
    assert (outcome.is_done, outcome.step) == (False, 2)
    assert weights(outcome.folder)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    again = train(plan(folder), method=LINEAR)
    whole = train(plan(folder, "whole"), method=LINEAR)
    assert again.is_done
    assert torch.equal(weights(again.folder)["1.weight"], weights(whole.folder)["1.weight"])


def test_another_configuration_does_not_go_on_from_this_checkpoint(folder):
    train(plan(folder, max_steps=1), method=LINEAR)
    with pytest.raises(ForedraftError, match=r"learning_rate was 0\.01 and is 0\.5; give another --out"):
        train(plan(folder, learning_rate=0.5), method=LINEAR)
    with pytest.raises(ForedraftError, match="settings"):
        train(plan(folder, settings={"loss": "kl"}), method=LINEAR)


def test_a_model_with_other_weights_does_not_go_on_from_this_checkpoint(folder):
    train(plan(folder, max_steps=1), method=LINEAR)
    tiny_models.llama(seed=5).float().save_pretrained(folder / "model")
    with pytest.raises(ForedraftError, match="another run: target"):
        train(plan(folder), method=LINEAR)


def test_a_checkpoint_that_was_cut_off_is_named(folder):
    train(plan(folder, max_steps=1), method=LINEAR)
    file = folder / "out" / "checkpoint-1" / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ForedraftError, match="checkpoint-1 is damaged"):
        train(plan(folder), method=LINEAR)


def test_a_checkpoint_half_written_is_not_taken_up(folder):
    train(plan(folder, max_steps=1), method=LINEAR)
    (folder / "out" / "checkpoint-5.partial").mkdir()
    assert train(plan(folder), method=LINEAR).is_done
    assert [path.name for path in (folder / "out").glob("checkpoint-*")] == ["checkpoint-6"]


def test_entries_beyond_the_checkpoint_are_noted_once(folder):
    out = train(plan(folder, max_steps=3), method=LINEAR).folder
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 9.0}\n{"st')
    train(plan(folder), method=LINEAR)
    assert [entry["step"] for entry in entries(out) if "loss" in entry] == [1, 6]


def test_a_loss_that_is_no_number_ends_the_run(folder):
    with pytest.raises(ForedraftError, match="lower --learning-rate"):
        train(plan(folder, steps=20, learning_rate=1e38, clip=1e38), method=LINEAR)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"context": 999, "batch_tokens": 2000}, "give --context 256 or less"),
        ({"files": ("nowhere.txt",)}, r"nowhere\.txt does not exist"),
        ({"files": ()}, "no data"),
        ({"batch_tokens": 8}, "holds no row of 16"),
        ({"decay": "stairs"}, "unknown value 'stairs'"),
        ({"settings": {"colour": "red"}}, "unknown training option 'colour'; this method takes: dropout, loss"),
        ({"settings": {"loss": "huber"}}, "unknown loss 'huber'"),
        ({"settings": {"dropout": "much"}}, "dropout takes float, got 'much'"),
        ({"settings": {"taps": "[9]"}}, "hidden layer 9 is not a boundary"),
        ({"start": "nowhere"}, "--start 'nowhere' is not a folder"),
        ({"precision": "int3"}, "unknown precision"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(folder, wrong, message):
    with pytest.raises(ForedraftError, match=message) as error:
        train(plan(folder, **wrong), method=LINEAR)
    assert "\n" not in str(error.value)


def test_an_array_of_other_ids_is_refused(folder):
    write_ids(folder, vocab_size=5000)
    with pytest.raises(ForedraftError, match="outside the target's vocabulary of 97"):
        train(plan(folder), method=LINEAR)


def test_a_plan_is_what_training_json_says(folder):
    out = train(plan(folder, max_steps=1), method=LINEAR).folder
    said = json.loads((out / "training.json").read_text())
    assert said["steps"]["learning_rate"] == 1e-2
    assert dataclasses.asdict(plan(folder).steps).keys() == said["steps"].keys()


def test_a_folder_of_something_else_is_not_written_to(folder):
    with pytest.raises(ForedraftError, match=r"holds config\.json and no training run; give an empty folder"):
        train(plan(folder, "model"), method=LINEAR)


def test_tensorboard_gets_the_same_figures(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = train(plan(folder, tensorboard=True), method=LINEAR).folder
    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    written = {event.step: event.value for event in board.Scalars("loss")}
    assert written == {entry["step"]: pytest.approx(entry["loss"]) for entry in entries(out) if "loss" in entry}


def test_a_run_without_accelerate_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ForedraftError, match=r"pip install 'foredraft\[train\]'"):
        train(plan(folder), method=LINEAR)


@pytest.mark.soak
def test_two_processes_learn_what_one_does(folder):
    code = (
        "import sys; from pathlib import Path; from tests.support.train_fakes import LINEAR, plan; "
        "from foredraft.train.run import train; train(plan(Path(sys.argv[1]), 'two'), method=LINEAR)"
    )
    (folder / "two.py").write_text(code)
    asked = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "two.py", str(folder)]
    places = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(asked, check=True, cwd=folder, env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"})
    one, two = weights(train(plan(folder, "one"), method=LINEAR).folder), weights(folder / "two")
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
