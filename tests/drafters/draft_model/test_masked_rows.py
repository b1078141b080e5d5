"""Rows of a training pass with masks: logits of plain passes, the rows that are kept, the tokens that are learnt."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foredraft.drafters.draft_model.masked_rows import MaskedRows, choose_rows, compute_masked_logits
from foredraft.drafters.draft_model.parallel_training import average_by_depth, prepare_parallel
from foredraft.drafters.draft_model.training import TrainConfig, create_trainee
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel
from foredraft.train.run import train
from tests.support import tiny_models, tiny_seq2seq
from tests.support.train_fakes import plan, weights, write_ids

LENGTH, MASK = 9, 96


def learn_all(length: int = LENGTH) -> torch.Tensor:
    return torch.ones(2, length + 1, dtype=torch.bool)


@pytest.mark.parametrize("retention", [1.0, 0.6])
def test_logits_of_all_rows_are_those_of_plain_passes(retention: float) -> None:
    """A row that saw a later true token, a mask of another draft, or a mask at another position would differ."""
    torch.manual_seed(1)
    model = tiny_models.llama()
    tokens = torch.randint(0, MASK, (2, LENGTH))
    rows = choose_rows(learn_all(), 4, retention, 0.0)
    with torch.no_grad():
        found = compute_masked_logits(model, tokens, rows, MASK)
        for n, (root, depth) in enumerate(zip(rows.roots.tolist(), rows.depths.tolist(), strict=True)):
            ids = torch.cat([tokens[:, : root + 1], tokens.new_full((2, depth), MASK)], -1)
            assert torch.allclose(found[:, n], model(input_ids=ids, use_cache=False).logits[:, -1], atol=1e-9)
    assert rows.positions.tolist() == (rows.roots + rows.depths).tolist()


def test_conditional_drop_keeps_a_falling_share_and_whole_prefixes() -> None:
    torch.manual_seed(0)
    rows = choose_rows(learn_all(100), 5, 0.5, 0.2)
    by_depth = [set(rows.roots[rows.depths == depth].tolist()) for depth in range(6)]
    *counts, last, none = [len(roots) for roots in by_depth]
    assert counts == [100, 50, 25, 20], "99 roots have a token at depth 2"
    assert 16 <= last <= 20, "drafts at the end of the text cannot go on"
    assert none == 0
    assert all(deeper <= roots for roots, deeper in pairwise(by_depth))
    whole = choose_rows(learn_all(6), 3, 1.0, 0.0)
    assert whole.roots.tolist() == [*range(6), *range(5), *range(4)]


def test_drafts_do_not_cross_tokens_that_are_not_learnt() -> None:
    """A user's turn (tokens 4 and 5) is not predicted, so no draft from before it reaches behind it."""
    mask = torch.tensor([[False, True, True, True, False, False, True, True]])
    rows = MaskedRows.build(7, [torch.arange(6), torch.arange(5)])
    learnt = rows.select_learnt(mask)[0]
    found = {
        (root, depth) for root, depth in zip(rows.roots[learnt].tolist(), rows.depths[learnt].tolist(), strict=True)
    }
    assert found == {(0, 0), (1, 0), (2, 0), (5, 0), (6, 0), (0, 1), (1, 1), (5, 1), (0, 2)}
    kept = choose_rows(mask, 3, 1.0, 0.0)
    assert kept.roots[kept.depths > 0].tolist() == [0, 1, 5, 0], "rows without a token to learn are not computed"
    assert len(choose_rows(torch.zeros_like(mask), 3, 1.0, 0.0).roots) == 7


def test_means_are_by_depth() -> None:
    found = average_by_depth(torch.tensor([1.0, 3.0, 8.0]), torch.tensor([0, 0, 2]), 3)
    assert found == {"loss_1": 2.0, "loss_2": 0.0, "loss_3": 8.0}


def test_models_that_do_not_take_such_rows_are_refused() -> None:
    windowed = AutoConfig.for_model("mistral", vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, sliding_window=8)  # fmt: skip
    recurrent = AutoConfig.for_model("mamba", vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    for config in (windowed, recurrent):
        with pytest.raises(ForedraftError, match="a layer does not attend to all tokens before it"):
            prepare_parallel(AutoModelForCausalLM.from_config(config), None)
    with pytest.raises(ForedraftError, match="an encoder-decoder model cannot"):
        prepare_parallel(tiny_seq2seq.t5(), None)
    with pytest.raises(ForedraftError, match=r"mask_token_id must lie in 0..96, got 97"):
        prepare_parallel(tiny_models.llama(), 97)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_token_id": 1}, "only parallel drafts have mask_token_id; set parallel=true too"),
        ({"parallel_tokens": 4, "retention": 0.5}, "only parallel drafts have parallel_tokens, retention"),
        ({"min_retention": 0.1}, "only parallel drafts have min_retention"),
        ({"parallel": True, "parallel_tokens": 1}, "parallel_tokens must be at least 2"),
        ({"parallel": True, "retention": 0.0}, "retention must be above 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    target = HFModel.wrap_model(tiny_models.llama(), "target")
    with pytest.raises(ForedraftError, match=message):
        create_trainee(TrainConfig(**settings), target)


def test_an_ordinary_draft_model_becomes_a_parallel_one(tmp_path: Path) -> None:
    """The loss of masks falls, the folder drafts in parallel, and training goes on from it with the same mask."""
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    write_ids(tmp_path)

    def run(out: str, settings: dict[str, str], **more: Any) -> Path:
        return Path(train(replace(plan(tmp_path, out, settings=settings, **more), method="draft_model")).folder)

    first = run("first", {"layers": "1", "hidden": "16"})
    parallel = {"parallel": "true", "parallel_tokens": "3", "mask_token_id": "90", "loss": "ce"}
    second = run("second", parallel, start=str(first), steps=60, batch_tokens=256)
    lines = (second / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if "loss_3" in line]
    for name in ("loss", "loss_2", "loss_3"):
        assert rows[-1][name] < rows[0][name], name
    config = AutoConfig.from_pretrained(second)
    assert (config.pard_token, config.spd_type) == (90, "pard")
    third = run("third", {"parallel": "true"}, start=str(second), steps=1, learning_rate=1e-12)
    assert AutoConfig.from_pretrained(third).pard_token == 90
    assert all(torch.allclose(x, weights(second)[name], atol=1e-6) for name, x in weights(third).items())
    with pytest.raises(ForedraftError, match="has mask_token_id=90, not 91"):
        run("other", {"parallel": "true", "mask_token_id": "91"}, start=str(second))
    with pytest.raises(ForedraftError, match="drafts in parallel and would forget it; set parallel=true too"):
        run("forgotten", {}, start=str(second))
