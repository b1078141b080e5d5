"""A full disk: an error of one line that says how to resume; old files stay, and no partial file is left."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foredraft.errors import ForedraftError
from foredraft.train.run import train
from tests.support import tiny_models
from tests.support.train_fakes import LINEAR, plan, weights, write_ids

ROOT = Path(__file__).parents[2]
SMALL = 8 << 10  # bytes that a file may have in the child: less than the weights of the drafter
CODE = """
import resource, sys
from pathlib import Path
from foredraft.errors import ForedraftError
from tests.support import train_fakes
from foredraft.train.run import train
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    train(train_fakes.plan(Path(sys.argv[1])), method=train_fakes.LINEAR)
except ForedraftError as error:
    print("refused:", error)
"""


@pytest.fixture
def folder(tmp_path):
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    write_ids(tmp_path)
    return tmp_path


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(folder):
    before = weights(train(plan(folder, max_steps=3), method=LINEAR).folder)
    outcome = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), str(SMALL)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    [line] = [line for line in outcome.stdout.splitlines() if line.startswith("refused:")]
    assert f"{folder / 'out'} could not be written" in line
    assert "make room, and the same command goes on from" in line
    left = sorted(path.name for path in (folder / "out").rglob("*"))
    assert not [name for name in left if ".part" in name], left
    after = weights(folder / "out")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert (folder / "out" / "checkpoint-3" / "state.json").exists()
    again = train(plan(folder), method=LINEAR)
    whole = train(plan(folder, "whole"), method=LINEAR)
    assert again.is_done
    assert all(torch.equal(weights(again.folder)[k], v) for k, v in weights(whole.folder).items())


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path):
    from torch import nn

    from foredraft.train.checkpoint import TrainingCheckpoints
    from foredraft.train.optimizer import GroupedOptimizer, ParameterGroup

    network = nn.Linear(64, 64)
    optimizer = GroupedOptimizer("adamw", [ParameterGroup.from_network(network)], 1e-3)
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(1, {"drafter": network}, optimizer.state_dict(), {"loss": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, before[1]))
    try:
        with pytest.raises(ForedraftError, match=r"could not be written \(.*goes on from checkpoint-1") as caught:
            checkpoints.save(2, {"drafter": network}, optimizer.state_dict(), {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert checkpoints.load(tmp_path / "checkpoint-1", {"drafter": network}, optimizer)["step"] == 1
