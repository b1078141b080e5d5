"""Boost-tuning: the next draft model learns the positions that the earlier ones miss."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foredraft import LLM, Sampling
from foredraft.drafters.draft_model.boosting import EarlierDrafts
from foredraft.drafters.draft_model.training import DraftTrainee, TrainConfig, create_trainee
from foredraft.drafters.losses import TargetLogProbs, Trace
from foredraft.errors import ForedraftError
from foredraft.train.run import train
from tests.support import tiny_models, tiny_seq2seq
from tests.support.train_fakes import plan, write_ids

VOCAB = 7


class Table(nn.Module):
    """A bigram model: its logits are a row per token."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=self.table[input_ids])


def make_trace(seed: int = 0) -> Trace:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (3, 9), generator=generator)
    mask = torch.rand(3, 9, generator=generator) < 0.7
    logits = 3 * torch.randn(3, 8, VOCAB, generator=generator)
    return Trace(tokens, torch.zeros(3, 8, 0), TargetLogProbs.from_logits(logits), mask)


def make_trainee(config: TrainConfig, *earlier: nn.Module) -> DraftTrainee:
    torch.manual_seed(1)
    return DraftTrainee(Table(torch.randn(VOCAB, VOCAB)), None, config, EarlierDrafts(earlier) if earlier else None)  # type: ignore[arg-type]


@pytest.mark.parametrize("top", [None, 3])
def test_the_likeliest_token_of_the_target(top: int | None) -> None:
    logits = torch.randn(2, 5, VOCAB)
    assert torch.equal(TargetLogProbs.from_logits(logits, top).find_argmax(), logits.argmax(-1))


def test_a_position_is_covered_if_any_earlier_model_predicts_it() -> None:
    trace = make_trace()
    expected = trace.target_log_probs.find_argmax()
    tables = [torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3)]
    found = EarlierDrafts(tuple(map(Table, tables))).find_covered(trace)
    by_hand = [
        [any(int(t[int(token)].argmax()) == int(best) for t in tables) for token, best in zip(row, bests, strict=True)]
        for row, bests in zip(trace.tokens[:, :-1], expected, strict=True)
    ]
    assert found.tolist() == by_hand
    assert 0 < found.float().mean() < 1


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_loss_weighs_covered_positions(weight: float) -> None:
    trace, earlier = make_trace(), Table(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)))
    trainee = make_trainee(TrainConfig(loss="ce", boost_weight=weight), earlier)
    losses = trainee.compute_loss(trace)
    covered = EarlierDrafts((earlier,)).find_covered(trace)
    weights = torch.where(covered, weight, 1.0) * trace.mask[:, 1:]
    each = nn.functional.cross_entropy(
        trainee.network(trace.tokens[:, :-1]).logits.transpose(1, 2), trace.tokens[:, 1:], reduction="none"
    )
    expected = (each * weights).sum() / trace.mask[:, 1:].sum()  # over all positions, so that passes of a step add up
    assert losses.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert losses.components["covered"] == pytest.approx(covered[trace.mask[:, 1:]].float().mean().item())
    plain = make_trainee(TrainConfig(loss="ce")).compute_loss(trace).total.item()
    assert (losses.total.item() == pytest.approx(plain, rel=1e-5)) == (weight == 1.0)


def test_a_step_in_which_all_is_covered_changes_nothing() -> None:
    tokens = torch.tensor([[1, 2, 1, 2]])
    table = torch.eye(VOCAB)[[0, 2, 1, 0, 0, 0, 0]]
    logits = table[tokens[:, :-1]]
    trace = Trace(tokens, torch.zeros(1, 3, 0), TargetLogProbs.from_logits(logits), torch.ones(1, 4, dtype=torch.bool))
    trainee = make_trainee(TrainConfig(boost_weight=0.0), Table(table))
    trainee.compute_loss(trace).total.backward()
    assert not trainee.network.table.grad.any()  # type: ignore[union-attr]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    write_ids(tmp_path, num_texts=40)
    return tmp_path


def run(folder: Path, **more: Any) -> Path:
    settings = {"hidden": "16", "layers": "1"} | more.pop("settings", {})
    return train(replace(plan(folder, settings=settings, **more), method="draft_model")).folder


def make_second_order_trace() -> Trace:
    """Traces of a target whose likeliest token is x + 1, or x + 2 if the last two tokens sum to a multiple of 3."""
    tokens = torch.randint(VOCAB, (64, 17), generator=torch.Generator().manual_seed(5))
    x, before = tokens[:, 1:-1], tokens[:, :-2]
    best = (x + 1 + ((x + before) % 3 == 0).long()) % VOCAB  # a third of the positions
    logits = 6.0 * nn.functional.one_hot(best, VOCAB)
    mask = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
    return Trace(tokens[:, 1:], torch.zeros(64, 15, 0), TargetLogProbs.from_logits(logits), mask)


def fit(trace: Trace, *earlier: nn.Module) -> Table:
    trainee = make_trainee(TrainConfig(), *earlier)
    optimizer = torch.optim.Adam(trainee.network.parameters(), lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        trainee.compute_loss(trace).total.backward()
        optimizer.step()
    return trainee.network  # type: ignore[return-value]


def test_a_boosted_model_predicts_what_the_earlier_one_misses() -> None:
    """A bigram model cannot tell the two cases apart: it learns the more frequent one, and a boosted one the other."""
    trace = make_second_order_trace()
    first, plain = fit(trace), fit(trace)
    boosted = fit(trace, first)
    cover = [EarlierDrafts(models).find_covered(trace).float().mean() for models in ((first,), (first, plain))]
    assert 0.6 < cover[0] == cover[1] < 0.75
    assert EarlierDrafts((first, boosted)).find_covered(trace).all()


def test_a_boosted_model_is_trained_and_drafts_beside_the_earlier_one(folder: Path) -> None:
    first = run(folder, out="first", steps=20)
    boosted = run(folder, out="boosted", steps=20, seed=1, settings={"boost": str(first)})
    rows = [json.loads(line) for line in (boosted / "metrics.jsonl").read_text().splitlines()]
    assert 0 <= rows[0]["covered"] < 1
    llm = LLM(str(folder / "model"), {"model": [str(first), str(boosted)], "num_speculative_tokens": 3})
    greedy = Sampling(temperature=0, max_tokens=16)
    [one], [plain] = (each.generate([[5, 6, 7]], greedy) for each in (llm, llm.with_drafter(None)))
    assert one.token_ids == plain.token_ids


def test_wrong_settings_are_one_line(folder: Path) -> None:
    target = LLM(str(folder / "model"), None).target
    other = copy.deepcopy(tiny_models.llama(vocab_size=50)).float()
    other.save_pretrained(folder / "other")
    tiny_seq2seq.make_model("t5").save_pretrained(folder / "seq2seq")
    for settings, words in (
        ({"boost_weight": 1.5}, "boost_weight must lie in 0..1, got 1.5"),
        ({"boost": (str(folder / "none"),)}, "none"),
        ({"boost": (str(folder / "other"),)}, "50 tokens"),
        ({"boost": (str(folder / "seq2seq"),)}, "seq2seq is an encoder-decoder model and .* a decoder alone"),
    ):
        with pytest.raises(ForedraftError, match=words) as caught:
            create_trainee(TrainConfig(hidden=16, layers=1, **settings), target)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
