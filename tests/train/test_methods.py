"""Full training runs: draft models on and off policy, tables, the target's own texts, targets that learn too."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from foredraft import LLM, Sampling
from foredraft.drafters.draft_model.training import TrainConfig as DraftConfig
from foredraft.drafters.joint_training import JointTraining
from foredraft.drafters.losses import LOSS_NAMES
from foredraft.errors import ForedraftError
from foredraft.train import generate as generate_module
from foredraft.train.config import EvaluationConfig
from foredraft.train.generate import AnswerWriter
from foredraft.train.run import train
from foredraft.train.settings import list_trainable_methods
from tests.support import tiny_models
from tests.support.train_fakes import LinearTrainee, make_method, plan, weights, write_ids

REPLAYED = {"evaluation": EvaluationConfig(prompts=4, tokens=24), "held_out_share": 0.2}


@pytest.fixture
def folder(tmp_path):
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    write_ids(tmp_path)
    return tmp_path


def run(folder, method, **more):
    from dataclasses import replace

    return train(replace(plan(folder, **more), method=method))


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_a_draft_learns_under_every_loss(folder, loss):
    settings = {"loss": loss, "layers": "1", "hidden": "16"}
    outcome = run(folder, "draft_model", settings=settings, steps=40, batch_tokens=128)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    found = [row["loss"] for row in rows if "loss" in row]
    assert found[-1] < found[0]


def test_the_replay_of_a_trained_draft_is_a_real_run_of_it(folder):
    outcome = run(folder, "draft_model", settings={"hidden": "32", "layers": "2"}, steps=80, **REPLAYED)
    llm = LLM(str(folder / "model"), {"method": "draft_model", "model": str(outcome.folder)}, num_speculative_tokens=5)
    measured = outcome.eval_metrics["sampled"]
    from foredraft.train.data import DocumentReader
    from foredraft.train.documents import hold_out
    from foredraft.train.evaluate import select_prompts

    documents = DocumentReader(None, 97, frozenset({3})).read_documents([str(folder / "ids.npy")])
    prompts = select_prompts(hold_out(documents, 0.2)[1], 4, 64)
    samplings = [Sampling(max_tokens=24, temperature=1.0, seed=i) for i in range(len(prompts))]
    stats = [c.stats for c in llm.generate(prompts, samplings)]
    real = sum(s.num_tokens for s in stats) / sum(s.target_passes for s in stats)
    assert measured["length"] == pytest.approx(real, abs=1e-4)


def test_a_draft_that_samples_its_own_text_resumes_with_the_same_bits(folder):
    same = {"settings": {"layers": "1", "hidden": "16", "on_policy": "0.6"}}
    whole = run(folder, "draft_model", out="whole", **same)
    run(folder, "draft_model", out="halves", max_steps=3, **same)
    halves = run(folder, "draft_model", out="halves", **same)
    off = run(folder, "draft_model", out="off", settings={**same["settings"], "on_policy": "0"})
    a, b, c = weights(whole.folder), weights(halves.folder), weights(off.folder)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_a_draft_samples_its_own_text_beside_a_cache(folder):
    """The cache has the rows of the data; with it, no step on the draft's own text may become one on the data."""
    settings = {"layers": "1", "hidden": "16"}
    plain, cached, off = (
        weights(run(folder, "draft_model", out=name, settings={**settings, "on_policy": share}, **more).folder)
        for name, share, more in (
            ("plain", "0.6", {}),
            ("cached", "0.6", {"cache": str(folder / "traces_of_policy")}),
            ("cached_off", "0", {"cache": str(folder / "traces_of_policy")}),
        )
    )
    assert all(torch.allclose(plain[name], cached[name], atol=1e-3) for name in plain)
    assert any(not torch.allclose(off[name], cached[name], atol=1e-3) for name in plain)


def test_a_draft_goes_on_from_another(folder):
    first = run(folder, "draft_model", out="first", settings={"layers": "1", "hidden": "16"}).folder
    second = run(folder, "draft_model", out="second", start=str(first), learning_rate=1e-9, steps=1).folder
    a, b = weights(first), weights(second)
    assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)


def test_a_draft_of_another_vocabulary_is_refused(folder):
    tiny_models.llama(vocab_size=50).float().save_pretrained(folder / "other")
    with pytest.raises(ForedraftError, match="50 tokens"):
        run(folder, "draft_model", start=str(folder / "other"))
    with pytest.raises(ForedraftError, match="is for 50 tokens and the target has 97"):
        run(folder, "draft_model", settings={"draft_config": str(folder / "other" / "config.json")})


def test_a_given_configuration_is_the_drafts(folder):
    tiny_models.llama(hidden=16).config.save_pretrained(folder / "shape")
    out = run(folder, "draft_model", settings={"draft_config": str(folder / "shape" / "config.json")}).folder
    assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 16


@pytest.mark.parametrize("wrong", [{"on_policy": "2"}, {"layers": "0", "hidden": "7"}])
def test_impossible_drafts_are_refused(folder, wrong):
    with pytest.raises(ForedraftError, match=r"lie in 0\.\.1|multiple of the head size 8"):
        run(folder, "draft_model", settings=wrong)


def test_a_table_is_counted_loaded_and_replayed(folder):
    outcome = run(folder, "ngram_lm", settings={"order": "3"}, **REPLAYED)
    assert outcome.eval_metrics["greedy"]["length"] >= 1
    LLM(str(folder / "model"), {"method": "ngram_lm", "model": str(outcome.folder)}).generate([[5, 6]])
    with pytest.raises(ForedraftError, match="order and min_count"):
        run(folder, "ngram_lm", settings={"order": "0"})


def test_methods_say_what_they_take():
    names = (
        "loss layers hidden encoder_layers draft_config on_policy boost boost_weight "
        "parallel parallel_tokens mask_token_id retention min_retention"
    )
    assert set(names.split()) == set(DraftConfig.__dataclass_fields__)
    methods = list_trainable_methods()
    assert methods["draft_model"].training.config is DraftConfig
    assert "order" in methods["ngram_lm"].training.config.__dataclass_fields__


PROMPTS = [[5, 6, 7 + i] for i in range(5)]


def writer(folder, llm=None, **more):
    given = {"max_tokens": 6, "temperatures": (0.0, 1.0), "seed": 0, **more}
    return AnswerWriter(llm or LLM(tiny_models.target(), None), folder, **given)


def test_the_target_answers_as_it_would_any_request(tmp_path):
    writer(tmp_path).write(PROMPTS)
    lines = [json.loads(line) for line in (tmp_path / "generated.jsonl").read_text().splitlines()]
    samplings = [Sampling(max_tokens=6, temperature=float(i % 2), seed=i) for i in range(5)]
    expected = tiny_models.plain().generate(PROMPTS, samplings)
    assert [line["ids"][3:] for line in lines] == [completion.token_ids for completion in expected]
    assert {line["prompt_tokens"] for line in lines} == {3}


def test_answers_there_are_are_not_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(generate_module, "ROUND", 2)
    writer(tmp_path).write(PROMPTS)
    file = tmp_path / "generated.jsonl"
    whole = file.read_text()
    file.write_text(whole[: whole.index("\n") + 30])  # one answer, and the beginning of the second
    asked = []
    writer(tmp_path, log_line=asked.append).write(PROMPTS)
    assert file.read_text() == whole
    assert "answers 4 prompts" in asked[0]


def test_answers_to_other_prompts_are_not_taken(tmp_path):
    writer(tmp_path).write(PROMPTS)
    with pytest.raises(ForedraftError, match="answers to other prompts or with other settings"):
        writer(tmp_path, max_tokens=7).write(PROMPTS)


def test_prompts_that_leave_no_room_are_left_out(tmp_path):
    said = []
    writer(tmp_path, log_line=said.append).write([[5] * 300, [6]])
    assert said[0] == "1 of 2 prompts are longer than 250: left out"
    with pytest.raises(ForedraftError, match="no prompt is shorter"):
        writer(tmp_path / "b").write([[5] * 300])


def test_a_run_learns_from_what_the_target_writes(folder):
    outcome = run(folder, "draft_model", settings={"layers": "1", "hidden": "16"}, generate=True, written=12)
    assert (outcome.folder / "generated.jsonl").exists()
    assert outcome.is_done


@dataclass(frozen=True)
class JointConfig:
    loss: str = "kl"
    backbone: float | None = 0.1


class Heads(LinearTrainee):
    def __init__(self, config, width, vocab_size):
        super().__init__(SimpleNamespace(loss=config.loss, dropout=0.0, taps=(-1,)), width, vocab_size)
        self.spec = replace(self.spec, joint=JointTraining(config.backbone, config.loss, warmup=1 / 3))


def joint(config, target, start=None):
    return Heads(config, target.hidden_size, target.vocab_size)


JOINT = make_method(JointConfig, joint)


def test_a_target_learns_with_its_heads_and_is_saved_beside_them(folder):
    before = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    warm = train(plan(folder, "warm", max_steps=2, generate=False), method=JOINT)
    whole = train(plan(folder, "whole", generate=False), method=JOINT)
    after = [AutoModelForCausalLM.from_pretrained(o.folder / "target").state_dict() for o in (warm, whole)]
    assert all(torch.equal(before[name], after[0][name]) for name in before)  # heads first
    assert any(not torch.equal(before[name], after[1][name]) for name in before)
    assert LLM(str(whole.folder / "target"), None).generate([[5, 6]])[0].token_ids
    train(plan(folder, "halves", max_steps=4), method=JOINT)
    halves = train(plan(folder, "halves"), method=JOINT)
    assert torch.equal(weights(whole.folder)["1.weight"], weights(halves.folder)["1.weight"])
    tuned = AutoModelForCausalLM.from_pretrained(halves.folder / "target").state_dict()
    assert all(torch.equal(tuned[name], after[1][name]) for name in tuned)


def test_live_states_are_those_of_the_traces(folder):
    from foredraft.train.trace import Tracer
    from foredraft.train.trainable_target import TrainableTarget

    llm = LLM(str(folder / "model"), None)
    live = TrainableTarget.from_model(llm.target, (0, 1, -1))
    tokens = torch.randint(4, 97, (2, 12))
    logits, states = live.forward(tokens)
    features, log_probs = Tracer(llm.target, (0, 1, -1)).run_target(tokens)
    assert torch.allclose(states, features, atol=1e-4)
    assert torch.allclose(logits.log_softmax(-1), log_probs.logprobs, atol=1e-3)
    assert states.requires_grad


def test_a_target_that_learns_keeps_no_traces(folder):
    with pytest.raises(ForedraftError, match="leave --cache out"):
        train(plan(folder, cache=str(folder / "traces")), method=JOINT)


def test_a_draft_of_few_tokens_takes_the_most_frequent(folder):
    """A published head lists the ids of its columns; ids chosen before the count would be the first ones."""
    rng = np.random.default_rng(1)
    common = np.array([7, 11, 40, 41, 90])
    texts = [[3, *rng.choice(common, 50)] for _ in range(12)] + [[3, *(4 + rng.integers(0, 93, 50))]]
    np.save(folder / "ids.npy", np.concatenate(texts).astype(np.uint16))
    settings = {"taps": "[1]", "draft_vocab_size": "5", "steps": "2"}
    outcome = run(folder, "eagle3", settings=settings, steps=2)
    offsets = load_file(outcome.folder / "model.safetensors")["d2t"]
    assert (torch.arange(5) + offsets).tolist() == common.tolist()
    llm = LLM(str(folder / "model"), {"method": "eagle3", "model": str(outcome.folder)})
    (done,) = llm.generate([[7, 11, 40]], Sampling(max_tokens=12, temperature=0, ignore_eos=True))
    assert done.stats.num_drafted > 0
