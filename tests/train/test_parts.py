"""The small parts: rates, optimizers, options by word, and the settings of a trainee."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from foredraft.drafters.method import Training
from foredraft.errors import ForedraftError
from foredraft.train.config import EvaluationConfig, find_difference
from foredraft.train.optimizer import GroupedOptimizer, LearningRateSchedule, ParameterGroup
from foredraft.train.run import train
from foredraft.train.settings import parse_pairs, parse_train_config
from tests.support import tiny_models
from tests.support.train_fakes import LinearTrainee, TrainConfig, make_method, plan, write_ids


@pytest.mark.parametrize("decay", ["linear", "cosine", "constant"])
def test_the_rate_rises_and_falls_to_nothing(decay):
    scales = [LearningRateSchedule(100, 10, decay).compute_scale(step) for step in range(101)]
    assert scales[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(scales) == 1
    assert scales[100] == pytest.approx(1.0 if decay == "constant" else 0.0)
    assert all(a >= b for a, b in itertools.pairwise(scales[10:]))


def test_each_group_moves_at_its_own_rate():
    slow, fast = nn.Linear(2, 2), nn.Linear(2, 2)
    before = [slow.weight.detach().clone(), fast.weight.detach().clone()]
    optimizer = GroupedOptimizer(
        "adamw", [ParameterGroup.from_network(slow, 0.1), ParameterGroup.from_network(fast)], 0.01
    )
    (slow(torch.ones(2)).sum() + fast(torch.ones(2)).sum()).backward()
    optimizer.step(1.0, 1e9)
    moved = [float((m.weight - b).detach().abs().mean()) for m, b in zip((slow, fast), before, strict=True)]
    assert moved == pytest.approx([0.001, 0.01], rel=1e-3)


def test_muon_leaves_what_reads_or_writes_a_vocabulary_to_adamw():
    network = nn.ModuleDict({"inner": nn.Linear(4, 4), "embed_tokens": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9)})
    muon, adam = GroupedOptimizer("muon", [ParameterGroup.from_network(network)], 0.01).optimizers
    assert [tuple(p.shape) for group in muon.param_groups for p in group["params"]] == [(4, 4)]
    assert len([p for group in adam.param_groups for p in group["params"]]) == 4


def test_a_drafter_without_parameters_cannot_be_trained():
    with pytest.raises(ForedraftError, match="no parameter takes a gradient"):
        GroupedOptimizer("adamw", [ParameterGroup.from_network(nn.ReLU())], 0.01)


@dataclass(frozen=True)
class Words:
    count: int = 1
    share: float = 0.5
    name: str = "x"
    is_tied: bool = False
    width: int | None = None
    sizes: tuple[int, ...] | None = None
    version: str | None = None


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("count=3", 3), ("share=1", 1.0), ("name=7", "7"), ("is_tied=true", True), ("width=None", None), ("width=8", 8),
        ("sizes=[2,3]", (2, 3)), ("sizes=null", None), ("sizes=2,3", (2, 3)), ("sizes=3", (3,)),
        ("version=1,2", "1,2"), ("version=b", "b"), ("is-tied=True", True),
    ],
)  # fmt: skip
def test_a_word_becomes_a_value_of_the_options_type(word, value):
    given = parse_pairs([word])
    [name] = given
    assert getattr(parse_train_config(Training(Words, learn=print), given), name) == value


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("count=2.5", "int"), ("count=true", "int"), ("share=much", "float"), ("is_tied=1", "bool"),
        ("sizes=a,b", r"numbers with commas between them \(sizes=1,3,5\) or None"), ("width=wide", "int or None"),
    ],
)  # fmt: skip
def test_a_word_of_another_type_is_refused(word, wanted):
    with pytest.raises(ForedraftError, match=f"takes {wanted}, got"):
        parse_train_config(Training(Words, learn=print), parse_pairs([word]))


def test_the_first_difference_is_named_with_its_place():
    assert find_difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == "a.c was 2 and is 3"
    assert find_difference({"a": [1]}, {"a": [1]}) is None
    assert find_difference({}, {"a": 1}) == "a was None and is 1"


def test_a_trainee_looks_at_held_out_text_before_it_is_written(tmp_path):
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    write_ids(tmp_path)
    seen = []

    class Looking(LinearTrainee):
        def __init__(self, *args):
            super().__init__(*args)
            self.spec = replace(self.spec, finish=self.finish, save=self.save)

        def finish(self, traces):
            assert not self.network.training
            seen.append(sum(int(trace.mask.sum()) for trace in traces))

        def save(self, folder):
            (folder / "drafter").write_text(str(len(seen)))

    def trainee(config, target, start=None):
        return Looking(config, target.hidden_size, target.vocab_size)

    made = make_method(TrainConfig, trainee)
    train(plan(tmp_path, held_out_share=0.2, evaluation=EvaluationConfig(prompts=0)), method=made)
    assert int((tmp_path / "out" / "drafter").read_text()) >= 1, "it was written before it had looked"
    assert seen[-1] == 2 * 50  # the tokens of two texts
