"""Unlikelihood training against repetition, and the measure of distinct n-grams."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foredraft.zoo_training.recipe import LlamaRecipe, TrainStage
from foredraft.zoo_training.repetition import (
    GreedyText,
    RepetitionRecipe,
    RepetitionRun,
    _add_text_gradient,
    compute_distinct_share,
    generate_texts,
    mark_repeats,
    reduce_repetition,
)
from foredraft.zoo_training.train import build_model

LLAMA = LlamaRecipe(hidden=32, intermediate=48, heads=2, kv_heads=1, stages=(TrainStage(2, 16, 2),))
RECIPE = RepetitionRecipe(
    learning_rate=0.03, weight=10.0, steps=12, warmup=1, texts=4, new_tokens=24, prompt_tokens=(2, 6),
    steps_per_round=3, windows=2, context=16, eval_every=2,
)  # fmt: skip


@pytest.fixture
def source(tmp_path):
    """Write a model that repeats its last token: with large embeddings, a token is most similar to itself."""
    folder, model = tmp_path / "source", build_model(LLAMA, 2)
    model.model.embed_tokens.weight.data *= 20
    model.save_pretrained(folder)
    (folder / "log.jsonl").write_text('{"step": 2, "layers": 2}\n')
    return folder


def make_run(source, folder, **more):
    ids = np.random.default_rng(0).integers(1, 4096, 4000).astype(np.uint16)
    return RepetitionRun(RECIPE, source, folder, ids, ids, **more)


@pytest.mark.parametrize(
    ("tokens", "marked"),
    [
        ([1, 2, 3, 4, 5, 6], []),
        ([1, 2, 3, 9, 1, 2, 3], []),
        ([1, 2, 3, 4, 9, 1, 2, 3, 4, 8], [5, 6, 7, 8]),
        ([7] * 6, [1, 2, 3, 4, 5]),
        ([1, 2, 3], []),
    ],
)
def test_tokens_of_an_ngram_that_occurred_before_are_marked(tokens, marked):
    assert np.flatnonzero(mark_repeats(tokens, allowed=1)).tolist() == marked


def test_an_ngram_may_occur_as_often_as_allowed():
    assert np.flatnonzero(mark_repeats([1, 2, 3, 4] * 4, allowed=3)).tolist() == [12, 13, 14, 15]
    assert not mark_repeats([1, 2, 3, 4, 9] * 3, allowed=3).any()


def test_share_of_distinct_ngrams():
    assert compute_distinct_share([1, 2, 3, 4, 5]) == 1.0
    assert compute_distinct_share([7] * 11) == 1 / 8
    assert compute_distinct_share([1, 2]) == 1.0


def test_the_gradient_lowers_the_probability_of_repeated_tokens_alone(source):
    """The loss is that of the formula, and a text without repeats has none, whatever it is padded to."""
    model = build_model(LLAMA, 2, torch.float32)
    repeated, varied = GreedyText([3, 4], [5] * 8), GreedyText([9, 10, 11], list(range(20, 28)))
    assert _add_text_gradient(model, [varied], 1.0, "cpu") == 0.0
    loss = _add_text_gradient(model, [varied, repeated], 1.0, "cpu")
    p = model(torch.tensor([[3, 4, *[5] * 8]])).logits[0].softmax(-1).detach()
    expected = -sum(torch.log1p(-p[at - 1, 5]) for at in range(5, 10)) / 16  # three of the five n-grams are allowed
    assert loss == pytest.approx(float(expected), rel=1e-5)


def test_greedy_text_repeats_itself_less_in_training(source, tmp_path):
    folder = tmp_path / "trained"
    reduce_repetition(make_run(source, folder))
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert rows[0] == {"step": 2, "layers": 2}, "the log of the source comes first"
    assert [row["repetition_step"] for row in rows[1:]] == [3, 6, 9, 12]
    assert [("held_loss" in row) for row in rows[1:]] == [False, True, False, True]
    assert max(row["distinct"] for row in rows[2:]) > 3 * rows[1]["distinct"]


def test_an_interrupted_run_resumes_to_the_same_weights(source, tmp_path):
    whole, cut = make_run(source, tmp_path / "whole"), make_run(source, tmp_path / "cut")
    reduce_repetition(whole)

    def interrupt(step, steps, loss):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reduce_repetition(replace(cut, progress=interrupt))
    reduce_repetition(cut)
    first, second = (load_file(run.folder / "model.safetensors") for run in (whole, cut))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not list(cut.folder.glob("checkpoint-*"))


def test_texts_are_greedy_continuations(source):
    model = build_model(LLAMA, 2, torch.float32).eval()
    (text,) = generate_texts(model, [[5, 6, 7]], 6, "cpu")
    ids = [5, 6, 7]
    for _ in range(6):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert list(text.continuation) == ids[3:]
