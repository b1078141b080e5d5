"""Full training runs for encoder-decoder targets: every method learns, is loaded, drafts, and leaves the text."""

import json
from dataclasses import replace

import pytest
import torch

from foredraft import LLM, Sampling
from foredraft.errors import ForedraftError
from foredraft.train.config import EvaluationConfig
from foredraft.train.documents import hold_out
from foredraft.train.evaluate import select_prompts
from foredraft.train.run import train
from foredraft.train.settings import list_trainable_methods
from tests.support import tiny_models, tiny_seq2seq
from tests.support.seq2seq_training import make_pairs, make_reader, save_pair, write_lines
from tests.support.train_fakes import plan, weights

SETTINGS = {
    "blockwise": {"heads": "3", "inner": "8"},
    "chimera": {"taps": "[1,-1]", "heads": "2"},
    "dflash": {"taps": "[1]", "num_layers": "1", "block_size": "5"},
    "draft_model": {"hidden": "16", "layers": "1"},
    "eagle": {"steps": "2"},
    "eagle3": {"taps": "[1]", "steps": "2"},
    "hydra": {"heads": "2"},
    "medusa": {"heads": "2"},
    "mlp_speculator": {"n_predict": "2", "inner": "16"},
    "ngram_lm": {"order": "3"},
}
REFUSALS = {  # methods that add a layer or an exit to a decoder without cross-attention
    "early_exit": r"needs a decoder-only target, and .*; train another method",
    "mtp": r"so no layer of its class can be added; use the method eagle",
}
FAMILIES = {"t5": "t5", "bart": "bart, forced"}
MEASURED = EvaluationConfig(prompts=3, tokens=24)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: save_pair(tmp_path_factory.mktemp(family), name) for family, name in FAMILIES.items()}


@pytest.fixture
def folder(folders, tmp_path):
    """A T5 in a folder of its own: only the model is shared."""
    (tmp_path / "model").symlink_to(folders["t5"] / "model")
    write_lines(tmp_path / "pairs.jsonl", make_pairs())
    return tmp_path


def run(folder, method, out="out", said=None, settings=None, **more):
    given = {
        "files": (str(folder / "pairs.jsonl"),), "context": 32, "batch_tokens": 96, "steps": 3, "held_out_share": 0.25,
        "generate": False, **more,
    }  # fmt: skip
    made = replace(plan(folder, out, settings=SETTINGS[method] | (settings or {}), **given), method=method)
    return train(made, log_line=([] if said is None else said).append)


def load(folder, method, drafter, num_tokens=5):
    return LLM(str(folder / "model"), {"method": method, "model": str(drafter)}, num_speculative_tokens=num_tokens)


def read_losses(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_every_trainable_method_is_here():
    assert set(SETTINGS) == set(list_trainable_methods()) - set(REFUSALS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", SETTINGS)
def test_a_trained_drafter_drafts_and_leaves_the_text(folders, tmp_path, family, method):
    folder = folders[family]
    made = run(folder, method, out=str(tmp_path / "out"), evaluation=MEASURED)
    llm = load(folder, method, made.folder)
    plain = llm.with_drafter(None)
    prompts = [pair["source"] for pair in make_pairs(4)]
    for sampling in (Sampling(max_tokens=20, temperature=0, ignore_eos=True), Sampling(max_tokens=20, seed=3)):
        done = llm.generate(prompts, sampling)
        assert [c.token_ids for c in done] == [c.token_ids for c in plain.generate(prompts, sampling)]
        assert sum(c.stats.num_drafted for c in done) > 0 or not sampling.ignore_eos
    assert llm.engine.drafter.num_failures == 0
    # the figures of the run are those of real requests
    held_out = hold_out(make_reader(llm).read_documents([str(folder / "pairs.jsonl")]), 0.25)[1]
    prompts = select_prompts(held_out, MEASURED.prompts, 64)
    for regime, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        samplings = [Sampling(max_tokens=24, temperature=temperature, seed=i) for i in range(len(prompts))]
        stats = [c.stats for c in llm.generate(prompts, samplings)]
        real = sum(s.num_tokens for s in stats) / sum(s.target_passes for s in stats)
        assert made.eval_metrics[regime]["length"] == pytest.approx(real, abs=1e-4)
    if method in ("blockwise", "draft_model", "eagle", "medusa"):
        assert made.eval_metrics["sampled"]["length"] > 1  # something was accepted


@pytest.mark.parametrize("method", ["draft_model", "medusa"])
def test_a_run_that_was_stopped_ends_with_the_same_bits(folder, method):
    whole = run(folder, method, "whole", steps=5, parts=2)
    first = run(folder, method, "halves", steps=5, parts=2, max_steps=2)
    second = run(folder, method, "halves", steps=5, parts=2)
    assert (first.is_done, second.is_done) == (False, True)
    assert equal(weights(whole.folder), weights(second.folder))


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_run_on_cached_traces_learns_nearly_the_same(folder, method):
    """Cached states of a float64 target are rounded to bfloat16; its distributions are whole."""
    live = run(folder, method, "live", steps=2, top=200)
    cached = run(folder, method, "cached", steps=2, top=200, cache=str(folder / "traces"))
    losses = [read_losses(each.folder)[0] for each in (live, cached)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("loss", ["ce", "kl", "tv"])
def test_a_draft_learns_what_its_target_writes(folder, loss):
    out = run(folder, "draft_model", loss, settings={"loss": loss}, steps=60, learning_rate=5e-3)
    losses = read_losses(out.folder)
    assert losses[-1] < 0.8 * losses[0]


def test_a_wrong_source_is_a_worse_draft(folder):
    """Fault that it guards: rows learnt beside the sources of other rows. The text is a copy of the source."""
    letters = "abcdefghij"
    pairs = [{"source": letters[i % 10] * 3, "text": letters[i % 10] * 5} for i in range(40)]
    for name, shift in (("right", 0), ("wrong", 3)):
        moved = [
            {"source": pairs[(i + i // 10 * shift) % 40]["source"], "text": pair["text"]}
            for i, pair in enumerate(pairs)
        ]
        write_lines(folder / f"{name}.jsonl", moved)
    losses = {}
    for name in ("right", "wrong"):
        out = run(
            folder, "draft_model", name, files=(str(folder / f"{name}.jsonl"),), steps=120, context=8,
            learning_rate=5e-3, settings={"loss": "ce"}, batch_tokens=128,
        ).folder  # fmt: skip
        losses[name] = read_losses(out)
    assert losses["right"][-1] < 0.7 * losses["wrong"][-1]


@pytest.mark.parametrize("method", ["draft_model", "medusa"])
def test_a_drafter_goes_on_from_another(folder, method):
    first = run(folder, method, "first").folder
    second = run(folder, method, "second", start=str(first), steps=1, learning_rate=1e-9).folder
    a, b = weights(first), weights(second)
    assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)


def test_a_draft_of_other_sizes_than_the_start_is_refused(folder):
    first = run(folder, "draft_model", "first").folder
    with pytest.raises(ForedraftError, match="has encoder_layers=1, not 2; leave --set encoder_layers out"):
        run(folder, "draft_model", "second", start=str(first), settings={"encoder_layers": "2"})


def test_a_draft_of_the_targets_width_begins_with_its_embeddings(folder):
    drafts = {
        name: run(folder, "draft_model", name, steps=1, learning_rate=1e-12, settings={"hidden": hidden}).folder
        for name, hidden in (("wide", "32"), ("narrow", "16"))
    }
    target = LLM(str(folder / "model"), None).target
    found = LLM(str(drafts["wide"]), None).target
    assert torch.allclose(found.embedding.double(), target.embedding, atol=1e-6)
    assert LLM(str(drafts["narrow"]), None).target.hidden_size == 16


def test_a_run_learns_from_what_the_target_writes(folder):
    out = run(folder, "medusa", generate=True, written=12).folder
    lines = [json.loads(line) for line in (out / "generated.jsonl").read_text().splitlines()]
    llm = LLM(str(folder / "model"), None)
    assert [line["source_ids"] for line in lines] == [llm.tokenizer(p["source"]).input_ids for p in make_pairs()]
    documents = make_reader(llm).read_documents([str(out / "generated.jsonl")])
    assert [document.source for document in documents] == [tuple(line["source_ids"]) for line in lines]
    for i, (pair, document) in enumerate(zip(make_pairs(), documents, strict=True)):
        [done] = llm.generate(pair["source"], Sampling(max_tokens=12, temperature=float(i % 2), seed=i))
        assert document.ids.tolist() == done.prompt_token_ids + done.token_ids
        assert document.ids[document.loss_mask].tolist() == done.token_ids
    again = run(folder, "medusa", "again", files=(str(out / "generated.jsonl"),)).folder  # the lines are data too
    assert weights(again).keys() == weights(out).keys()


def test_answers_to_other_sources_are_not_taken(folder):
    """Prompts of one decoder prefix differ by their sources alone."""
    run(folder, "blockwise", generate=True, written=8, max_steps=1)
    write_lines(folder / "pairs.jsonl", [{"source": f"another {i}"} for i in range(12)])
    with pytest.raises(ForedraftError, match="answers to other prompts or with other settings"):
        run(folder, "blockwise", generate=True, written=8)


def test_a_draft_that_samples_its_own_text_resumes_with_the_same_bits(folder):
    same = {"settings": {"on_policy": "0.6"}, "steps": 5}
    whole = run(folder, "draft_model", "whole", **same)
    run(folder, "draft_model", "halves", max_steps=2, **same)
    halves = run(folder, "draft_model", "halves", **same)
    off = run(folder, "draft_model", "off", steps=5)
    assert equal(weights(whole.folder), weights(halves.folder))
    assert not equal(weights(whole.folder), weights(off.folder))


def test_a_boosted_draft_is_trained_and_drafts_beside_the_earlier_one(folder):
    first = run(folder, "draft_model", "first", steps=10).folder
    boosted = run(folder, "draft_model", "boosted", settings={"boost": str(first)}, seed=1).folder
    rows = [json.loads(line) for line in (boosted / "metrics.jsonl").read_text().splitlines()]
    assert 0 <= rows[0]["covered"] < 1
    llm = LLM(str(folder / "model"), {"model": [str(first), str(boosted)], "num_speculative_tokens": 3})
    greedy = Sampling(temperature=0, max_tokens=16)
    [one], [plain] = (each.generate(["teh end"], greedy) for each in (llm, llm.with_drafter(None)))
    assert one.token_ids == plain.token_ids


@pytest.mark.parametrize(("context", "is_logged"), [(8, True), (31, False)])
def test_texts_that_are_cut_are_counted(folder, context, is_logged):
    said = []
    write_lines(folder / "pairs.jsonl", [{"source": "a", "text": "b " * (3 if i % 3 else 12)} for i in range(12)])
    run(folder, "blockwise", said=said, context=context)
    cut = [line for line in said if "only their beginnings are learnt" in line]
    assert bool(cut) is is_logged
    assert not is_logged or cut[0].startswith("3 of 9 texts are longer than --context 8")


def test_prompts_alone_are_no_data(folder):
    write_lines(folder / "pairs.jsonl", [{"source": "a"}, {"source": "b"}])
    with pytest.raises(ForedraftError, match="no text in it to learn from"):
        run(folder, "blockwise")
    assert run(folder, "blockwise", "generated", generate=True, written=8).is_done


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        (
            "draft_model",
            {"start": "llama"},
            "is a decoder alone and .* an encoder-decoder model; use a draft of the same",
        ),
        ("draft_model", {"settings": {"boost": "llama"}}, "is a decoder alone and .* an encoder-decoder model"),
        ("draft_model", {"start": "wide"}, "90 tokens"),
        (
            "draft_model",
            {"settings": {"draft_config": "llama"}},
            "is a decoder alone and .* use a draft of the same architecture",
        ),
        ("draft_model", {"settings": {"hidden": "20"}}, "hidden must be a multiple of the head size 16"),
        ("medusa", {"settings": {"backbone": "0.1"}}, "encoder-decoder model, which cannot be trained too; leave back"),
        ("medusa", {"files": ("ids.npy",)}, "has no source"),
        ("medusa", {"files": ("text.txt",)}, r"has no source \(its keys: text\)"),
        ("medusa", {"files": ("long.jsonl",)}, "tokens and the encoder of .* takes 16384; shorten it or leave"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(folder, method, wrong, message):
    tiny_models.llama(vocab_size=320).save_pretrained(folder / "llama")
    tiny_seq2seq.make_model("t5", vocab=90).save_pretrained(folder / "wide")
    (folder / "ids.npy").write_bytes(b"")
    (folder / "text.txt").write_text("the end")
    write_lines(folder / "long.jsonl", [{"source": "a" * 16400, "text": "b"}])

    def place(value):
        return str(folder / value) if (folder / value).exists() else value

    given = {
        name: {key: place(each) for key, each in value.items()} if isinstance(value, dict)
        else tuple(map(place, value)) if isinstance(value, tuple) else place(value)
        for name, value in wrong.items()
    }  # fmt: skip
    with pytest.raises(ForedraftError, match=message) as error:
        run(folder, method, "wrong", **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", REFUSALS)
def test_methods_that_need_a_decoder_without_an_encoder_are_refused(folder, method):
    with pytest.raises(ForedraftError, match=REFUSALS[method]):
        train(replace(plan(folder, files=(str(folder / "pairs.jsonl"),), context=32), method=method))


def test_audio_is_refused(tmp_path):
    tiny_seq2seq.make_model("whisper").save_pretrained(tmp_path / "model")
    write_lines(tmp_path / "pairs.jsonl", make_pairs())
    with pytest.raises(ForedraftError, match="reads audio"):
        run(tmp_path, "medusa")


@pytest.mark.parametrize("wrong", ["start", "boost", "draft_config"])
def test_a_draft_with_an_encoder_for_a_target_without_is_refused(folder, wrong):
    (folder / "decoder").mkdir()
    tiny_models.llama(vocab_size=320).save_pretrained(folder / "decoder" / "model")
    tiny_models.tokenizer().save_pretrained(folder / "decoder" / "model")
    (folder / "decoder" / "a.txt").write_text("the end of the end " * 20)
    other = str(folder / "model")
    given = {"start": other} if wrong == "start" else {"settings": {wrong: other}}
    with pytest.raises(ForedraftError, match=r"an encoder-decoder model and .* a decoder alone") as error:
        run(folder / "decoder", "draft_model", files=(str(folder / "decoder" / "a.txt"),), **given)
    assert "\n" not in str(error.value)
