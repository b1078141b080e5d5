"""Models that the claims make: noise of a size, and heads of the small target beside the grown one."""

from pathlib import Path

import pytest
import torch

from foredraft import Sampling
from foredraft.bench.methods import PLAIN
from foredraft.models.loading import load_model
from foredraft.reproduce.narrow_features import select_leading
from foredraft.reproduce.noisy_draft import write_noisy_target
from foredraft.reproduce.workbench import GREEDY, ReproduceOptions, Workbench

PROMPT = "class TestQueue(unittest.TestCase):"


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Workbench:
    return Workbench(ReproduceOptions(is_quick=True), tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("text", ["medusa:3", "eagle3:3", "draft_model:3", "eagle3:4:tree_nodes=8"])
def test_a_drafter_drafts_the_same_beside_the_grown_target(bench, text):
    """Fault: heads that read the wrong coordinates, whose drafts the grown target would reject."""
    sampling = Sampling(temperature=0.0, max_tokens=32, ignore_eos=True)
    small, grown = (
        bench.add_drafter(llm, text).generate([PROMPT], sampling)[0] for llm in (bench.built_in, bench.grown)
    )
    assert small.token_ids == grown.token_ids
    assert small.stats.accepted_at == grown.stats.accepted_at
    assert small.stats.num_accepted > 0


def test_the_leading_coordinates_of_every_state_are_selected():
    features = torch.arange(12.0).view(1, 1, 12)  # two states of six coordinates
    assert select_leading(features, 2, 2).tolist() == [[[0.0, 1.0, 6.0, 7.0]]]


def test_noise_has_its_size_and_its_seed(tmp_path):
    for name, size, seed in (("a", 0.1, 0), ("b", 0.1, 0), ("c", 0.1, 1), ("d", 0.0, 0)):
        write_noisy_target(size, tmp_path / name, seed)
    weights = {name: dict(read_weights(tmp_path / name)) for name in "abcd"}
    for name, weight in weights["d"].items():
        difference = (weights["a"][name] - weight).std() / weight.std()
        assert torch.equal(weights["a"][name], weights["b"][name])
        assert difference == pytest.approx(0.1, rel=0.1) if weight.dim() > 1 else difference == 0
        assert weight.dim() < 2 or not torch.equal(weights["a"][name], weights["c"][name])


def read_weights(folder: Path) -> list[tuple[str, torch.Tensor]]:
    model = load_model(str(folder), "auto", torch.device("cpu"))
    return [(name, weight.detach().float()) for name, weight in model.named_parameters()]


def test_only_first_turns_are_prompts(bench, tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text('{"turns": ["one", "two"]}\n')
    other = Workbench(ReproduceOptions(questions=file, is_quick=True), tmp_path)
    [prompt] = other.load_prompts(4)
    assert prompt.turns == ("one",)
    runs = bench.run({PLAIN: bench.built_in}, GREEDY, [prompt], 4, rounds=2).runs
    assert len(runs[PLAIN]) == 1
    assert len(runs[PLAIN][0].completions) == 2
