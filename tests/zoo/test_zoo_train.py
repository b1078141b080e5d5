"""The recipe that makes the built-in pair, run end to end in miniature."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from foredraft import LLM, Sampling
from foredraft.zoo import build, corpus
from foredraft.zoo.heads import RECIPES, Heads
from foredraft.zoo.measure import PairFigures, measure
from foredraft.zoo.recipe import Recipe, Stage
from foredraft.zoo.seq2seq import SEQ2SEQ, SEQ2SEQ_DRAFT
from foredraft.zoo.seq2seq_build import PairRecipe
from foredraft.zoo.train import build as untrained
from foredraft.zoo.train import distillation_loss, rate, stacked, train, windows

TINY = Recipe(
    hidden=32, intermediate=48, heads=2, kv_heads=1, batch_tokens=64, warmup=1,
    stages=(Stage(1, 16, 3), Stage(2, 32, 2)),
)  # fmt: skip
TINY_DRAFT = replace(TINY, hidden=16, stages=(Stage(1, 16, 3),))
TINY_PAIR = PairRecipe(
    replace(SEQ2SEQ, hidden=16, intermediate=16, heads=2, encoder_layers=1, decoder_layers=1, steps=3, batch_tokens=64),
    replace(SEQ2SEQ_DRAFT, hidden=8, intermediate=8, heads=1, encoder_layers=1, steps=2, batch_tokens=64),
)


@pytest.fixture
def python_tree(tmp_path):
    """A standard library in miniature: training files, a held-out module and its test, and tables to skip."""
    root = tmp_path / "lib"
    (root / "test").mkdir(parents=True)
    (root / "encodings").mkdir()
    body = "".join(f"def function_{i}(argument):\n    return argument + {i}\n\n" for i in range(60))
    for name in ("alpha.py", "beta.py", "heapq.py", "test/test_heapq.py", "test/test_alpha.py", "encodings/big.py"):
        (root / name).write_text(f"# What the module {name} is made for, and how it is used.\n{body}")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    return root


def test_held_out_modules_and_their_tests_are_never_trained_on(python_tree):
    train_files, held = corpus.split(python_tree)
    assert [s.name for s in held] == ["heapq.py", "test/test_heapq.py"]
    assert [s.name for s in train_files] == ["alpha.py", "beta.py", "test/test_alpha.py"]


def test_the_real_split_holds_out_every_module_on_the_list():
    train_files, held = corpus.split()
    assert not any(s.is_held_out for s in train_files)
    assert {"heapq.py", "textwrap.py", "json/decoder.py"} <= {s.name for s in held}


def test_prompts_come_from_held_out_modules_only():
    prompts = corpus.held_out_prompts(50)
    held = [s.text for s in corpus.split()[1]]
    assert len(set(prompts)) == 50
    assert all(any(prompt in text for text in held) for prompt in prompts)


def test_everything_is_built_and_measured_and_loads_in_transformers(python_tree, tmp_path):
    out = tmp_path / "out"
    steps = []
    of_two_layers = {"eagle3": {"taps": "[1]"}, "early_exit": {"exit_layer": "1", "rank": "8"}}
    tiny = tuple(replace(h, steps=2, settings=h.settings | of_two_layers.get(h.method, {})) for h in RECIPES)
    heads = Heads(tiny, documents=4, corpus_tokens=4000, prompts=2, tokens=16)
    figures = build.build_all(
        out,
        target=TINY,
        draft=TINY_DRAFT,
        root=python_tree,
        report=lambda part, step, of, loss: steps.append(part),
        heads=heads,
        pair=TINY_PAIR,
    )
    assert 0 < figures.alpha < 1
    assert set(steps) == {*build.PARTS, *(head.method for head in RECIPES), "seq2seq", "seq2seq_draft"}
    for head in RECIPES:
        llm = LLM(str(out / "target"), {"method": head.method, "model": str(out / head.method)})
        (done,) = llm.generate("def f(", Sampling(max_tokens=8, temperature=0, ignore_eos=True))
        assert done.stats.num_drafted > 0
        assert str(out) not in (out / head.method / "config.json").read_text()
        assert f"foredraft train {head.method}" in (out / head.method / "README.md").read_text()
    for part in build.PARTS:
        model = AutoModelForCausalLM.from_pretrained(out / part)
        assert model.dtype == torch.bfloat16
        tokenizer = AutoTokenizer.from_pretrained(out / part)
        assert tokenizer.decode(tokenizer("def f(x):\n\treturn é").input_ids) == "def f(x):\n\treturn é"
        assert "heapq" in (out / part / "README.md").read_text()
    assert json.loads((out / "figures.json").read_text())["draft"]["alpha"] == figures.alpha


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path):
    """A resumed run that repeats or skips a batch gives other weights."""
    ids = np.random.default_rng(0).integers(0, 4096, 4000).astype(np.uint16)
    whole = train(TINY, ids, tmp_path / "whole").state_dict()

    def interrupt(step, steps, loss):
        if step == 4:
            raise KeyboardInterrupt

    long = replace(TINY, checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        train(long, ids, tmp_path / "cut", progress=interrupt)
    resumed = train(long, ids, tmp_path / "cut").state_dict()
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name
    assert not (tmp_path / "cut" / "checkpoint.pt").exists()
    saved = load_file(tmp_path / "cut" / "model.safetensors")
    assert "lm_head.weight" not in saved, "tied embeddings are stored once"


def test_stacking_repeats_the_layers_in_order():
    shallow = untrained(TINY, 2)
    deep = stacked(TINY, shallow, 4)
    for i in range(4):
        ours, theirs = deep.model.layers[i].state_dict(), shallow.model.layers[i % 2].state_dict()
        assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert torch.equal(deep.lm_head.weight, shallow.lm_head.weight)


def test_the_rate_warms_up_and_ends_at_zero():
    recipe = replace(TINY, stages=(Stage(1, 16, 100),), warmup=10, decay=0.5)
    rates = [rate(recipe, step) for step in range(101)]
    assert rates[0] == 0.1
    assert rates[20] == rates[50] == 1
    assert rates[100] == 0
    assert rates == sorted(rates[:50]) + sorted(rates[50:], reverse=True)


def test_every_window_is_met_once_in_a_pass():
    ids = np.arange(1000).astype(np.uint16)
    batches = windows(ids, 10, 3, seed=0)
    starts = [int(row[0]) for _ in range(30) for row in next(batches)]
    assert len(set(starts)) == 90


def test_distilling_a_model_into_itself_costs_nothing():
    model = untrained(TINY, 1, torch.float32).eval()
    ids = torch.randint(0, 4096, (2, 8))
    logits = model(ids).logits.flatten(0, 1)
    loss = distillation_loss(model)(ids, logits, ids.flatten())
    assert loss.item() == pytest.approx(0, abs=1e-4)


def test_figures_of_a_perfect_draft():
    model = untrained(TINY, 1, torch.float32).eval()
    ids = np.random.default_rng(1).integers(0, 4096, 400).astype(np.uint16)
    figures = measure(model, model, ids, context=32, windows=4)
    assert figures.alpha == pytest.approx(1, abs=1e-5)
    assert figures.lengths == pytest.approx(range(2, 10), abs=1e-3)
    assert figures.greedy_lengths == tuple(range(2, 10))


def test_the_formula_of_the_paper():
    figures = PairFigures(0, 0, 0.5, 0, (), (), 0)
    assert figures.formula(2) == pytest.approx(1 + 0.5 + 0.25)
