"""The encoder-decoder pair's training: what it sees, that it learns, and that a stopped run goes on."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from foredraft import LLM, Sampling, zoo
from foredraft.train.precision import choose_training_dtype
from foredraft.zoo.corpus import SourceFile
from foredraft.zoo_training import tokens
from foredraft.zoo_training.seq2seq import (
    IGNORE_INDEX,
    SEQ2SEQ_RECIPE,
    Seq2SeqBatch,
    Seq2SeqJob,
    append_end_token,
    compute_clean_loss,
    compute_logits,
    make_batches,
    train,
)
from foredraft.zoo_training.seq2seq_build import Seq2SeqPairRecipe, build_pair
from foredraft.zoo_training.seq2seq_heads import make_plan

DTYPE = choose_training_dtype("cpu")  # some processors take 100 times as long in bfloat16
TEXTS = [f"The value number {i} is returned to the caller of this function." for i in range(40)]
TINY = replace(
    SEQ2SEQ_RECIPE, hidden=16, intermediate=16, heads=2, encoder_layers=1, decoder_layers=1, steps=4, warmup=1,
    batch_tokens=128, checkpoint_every=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return append_end_token(tokens.load_tokenizer(zoo.find_folder("target")))


def test_both_sides_end_with_the_end_of_the_text(tokenizer):
    batch = Seq2SeqBatch.from_texts(tokenizer, ["a bb", "a longer text"], ["a b", "a longer text"])
    for row, mask in zip(batch.source, batch.mask, strict=True):
        assert row[mask][-1] == 0
        assert not row[~mask].any()
    assert all(row[row != IGNORE_INDEX][-1] == 0 for row in batch.target)


def test_errors_are_on_the_encoders_side_alone(tokenizer):
    batch = next(make_batches(tokenizer, TEXTS, 512, seed=0, rate=0.3))
    clean = {tuple(encoding.ids) for encoding in tokenizer.encode_batch(TEXTS)}
    assert all(tuple(row[row != IGNORE_INDEX].tolist()) in clean for row in batch.target)
    assert any(tuple(row[mask].tolist()) not in clean for row, mask in zip(batch.source, batch.mask, strict=True))


def test_padding_changes_no_loss(tokenizer):
    model = AutoModelForSeq2SeqLM.from_config(_config()).double().eval()
    alone = [
        Seq2SeqBatch.from_texts(tokenizer, [text], [text]) for text in ("short", "a text that is a good deal longer")
    ]
    together = Seq2SeqBatch.from_texts(
        tokenizer, ["short", "a text that is a good deal longer"], ["short", "a text that is a good deal longer"]
    )
    with torch.no_grad():
        sums = [compute_clean_loss(b, compute_logits(model, b)) * (b.target != IGNORE_INDEX).sum() for b in alone]
        both = compute_clean_loss(together, compute_logits(model, together)) * (together.target != IGNORE_INDEX).sum()
    torch.testing.assert_close(both, sum(sums), rtol=1e-4, atol=1e-4)


def _config():
    from foredraft.zoo_training.seq2seq import build_model

    return build_model(TINY).config


def test_a_stopped_run_goes_on_where_it_was(tokenizer, tmp_path: Path):
    def stop(step: int, steps: int, loss: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    job = Seq2SeqJob(TINY, tokenizer, TEXTS, TEXTS[:4], tmp_path / "run", progress=stop, dtype=DTYPE)
    with pytest.raises(KeyboardInterrupt):
        train(job)
    seen: list[int] = []
    train(replace(job, progress=lambda step, steps, loss: seen.append(step)))
    assert seen == [3, 4]
    assert job.checkpoints.find_latest() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_after_the_step_under_way(tokenizer, tmp_path: Path, number):
    """Fault: Ctrl-C lost all steps since the last checkpoint, up to 100."""

    def interrupt(step: int, steps: int, loss: float) -> None:
        if step == 2:
            os.kill(os.getpid(), number)

    recipe = replace(TINY, checkpoint_every=100)
    job = Seq2SeqJob(recipe, tokenizer, TEXTS, TEXTS[:4], tmp_path / "run", progress=interrupt, dtype=DTYPE)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        train(job)
    assert job.checkpoints.find_latest() == job.folder / "checkpoint-3"
    assert signal.getsignal(number) is before
    seen: list[int] = []
    train(replace(job, progress=lambda step, steps, loss: seen.append(step)))
    assert seen == [4]


def test_the_pair_loads_in_transformers_and_says_what_it_is(tmp_path: Path):
    files = [SourceFile("a.py", "\n\n".join(f"# {text}" for text in TEXTS))]
    made = tokens.load_tokenizer(zoo.find_folder("target"))
    heads = make_plan()
    tiny = {name: replace(recipe, steps=2) for name, recipe in heads.recipes.items()}
    pair = Seq2SeqPairRecipe(
        TINY, replace(TINY, hidden=8, heads=1), replace(heads, recipes=tiny, documents=8, prompts=2, tokens=8)
    )
    build_pair(tmp_path, "cpu", made, files, files, lambda *_: None, lambda line: None, pair)
    assert set(tiny) == {"blockwise", "eagle", "medusa"}
    for method in tiny:
        folder = tmp_path / f"seq2seq_{method}"
        llm = LLM(str(tmp_path / "seq2seq"), {"method": method, "model": str(folder)})
        (done,) = llm.generate("Teh text.", Sampling(max_tokens=8, temperature=0, ignore_eos=True))
        assert done.stats.num_drafted > 0
        assert str(tmp_path) not in (folder / "config.json").read_text()
        assert f"--model builtin-seq2seq --spec-method {method}" in (folder / "README.md").read_text()
    for name in ("seq2seq", "seq2seq_draft"):
        model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name)
        assert model.config.decoder_start_token_id == 0
        assert model.dtype == torch.bfloat16, "whatever dtype it was trained in"
        assert AutoTokenizer.from_pretrained(tmp_path / name)("text").input_ids[-1] == 0
        assert "foredraft zoo train" in (tmp_path / name / "README.md").read_text()
