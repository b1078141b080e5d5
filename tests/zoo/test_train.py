"""The recipe that makes the built-in pair, run end to end in miniature."""

import json
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from foredraft import LLM, ForedraftError, Sampling, zoo
from foredraft.train.checkpoint import OPTIMIZER_FILE, WEIGHTS_FILE
from foredraft.zoo import corpus
from foredraft.zoo_training import build
from foredraft.zoo_training.batches import WindowBatches
from foredraft.zoo_training.heads import HeadsPlan, find_head_folder, list_head_folders, list_recipes
from foredraft.zoo_training.measure import PairMetrics, measure_pair
from foredraft.zoo_training.recipe import TARGET_RECIPE, LlamaRecipe, TrainStage
from foredraft.zoo_training.seq2seq import SEQ2SEQ_DRAFT_RECIPE, SEQ2SEQ_RECIPE
from foredraft.zoo_training.seq2seq_build import Seq2SeqPairRecipe
from foredraft.zoo_training.train import (
    PretrainingRun,
    compute_next_token_loss,
    make_distillation_loss,
    make_schedule,
    stack_layers,
    train,
)
from foredraft.zoo_training.train import build_model as untrained

TINY = LlamaRecipe(
    hidden=32, intermediate=48, heads=2, kv_heads=1, batch_tokens=64, micro_tokens=32, warmup=1,
    stages=(TrainStage(1, 16, 3), TrainStage(2, 16, 2)), decay=0.6, long_context=32,
    cycles=((TrainStage(2, 16, 1), TrainStage(2, 32, 1)),),
)  # fmt: skip
TINY_DRAFT = replace(TINY, hidden=16, stages=(TrainStage(1, 16, 3),), cycles=())
TINY_PAIR = Seq2SeqPairRecipe(
    replace(
        SEQ2SEQ_RECIPE,
        hidden=16,
        intermediate=16,
        heads=2,
        encoder_layers=1,
        decoder_layers=1,
        steps=3,
        batch_tokens=64,
    ),
    replace(SEQ2SEQ_DRAFT_RECIPE, hidden=8, intermediate=8, heads=1, encoder_layers=1, steps=2, batch_tokens=64),
    HeadsPlan(
        {name: replace(recipe, steps=2) for name, recipe in list_recipes(zoo.SEQ2SEQ_TARGET).items()},
        documents=4, prompts=2, tokens=8,
    ),
)  # fmt: skip


@pytest.fixture
def python_tree(tmp_path):
    """Make a standard library in miniature: training files, a held-out module and its test, and tables to skip."""
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
    prompts = corpus.make_held_out_prompts(50)
    held = [s.text for s in corpus.split()[1]]
    assert len(set(prompts)) == 50
    assert all(any(prompt in text for text in held) for prompt in prompts)


def test_everything_is_built_and_measured_and_loads_in_transformers(python_tree, tmp_path):
    out = tmp_path / "out"
    steps = []
    tiny_settings = {
        "eagle3": {"taps": "[1]"},
        "dflash": {"taps": "[1,2]", "intermediate": "16"},
        "early_exit": {"exit_layer": "1", "rank": "8"},
        "draft_model": {"draft_config": str(out / "draft")},  # the recipe's is larger than a tiny target
    }
    recipes = list_recipes()
    tiny = {
        name: replace(recipe, steps=2, further_steps=0, settings={**recipe.settings, **tiny_settings.get(name, {})})
        for name, recipe in recipes.items()
    }
    tiny |= {name: replace(tiny[name], further_steps=1) for name in ("eagle3", "medusa")}
    heads = HeadsPlan(tiny, documents=4, corpus_tokens=4000, prompts=2, tokens=16)

    def run(**more):
        return build.build_all(
            out, target=TINY, draft=TINY_DRAFT, root=python_tree, heads=heads,
            pair=TINY_PAIR, report=lambda part, step, of, loss: steps.append(part), **more,
        )  # fmt: skip

    figures = run()
    assert 0 < figures.alpha < 1
    folders = {name: find_head_folder(name) for name in recipes}
    pair_folders = {find_head_folder(name, zoo.SEQ2SEQ_TARGET) for name in list_recipes(zoo.SEQ2SEQ_TARGET)}
    assert set(steps) == {*build.PARTS, *folders.values(), "seq2seq", "seq2seq_draft", *pair_folders}
    assert {*folders.values(), *pair_folders} == set(list_head_folders())
    for method, name in folders.items():
        llm = LLM(str(out / "target"), {"method": method, "model": str(out / name)})
        (done,) = llm.generate("def f(", Sampling(max_tokens=8, temperature=0, ignore_eos=True))
        assert done.stats.num_drafted > 0
        assert str(out) not in (out / name / "config.json").read_text()
        assert f"foredraft train {method}" in (out / name / "README.md").read_text()
    assert "--boost draft " in (out / "draft_2" / "README.md").read_text()
    for name in ("eagle3", "medusa"):
        assert ", then 1 steps from its result with `--start`" in (out / name / "README.md").read_text()
        assert "--start" not in (out / "first" / name / "README.md").read_text()
        first, last = (load_file(folder / "model.safetensors") for folder in (out / "first" / name, out / name))
        assert any(not torch.equal(first[key], last[key]) for key in first)
        assert all((first[key].double() - last[key].double()).abs().max() < 0.1 for key in first)  # not begun anew
    assert not (out / "first" / "hydra").exists()
    assert not (out / build.UNDISTILLED).exists()
    assert build.UNDISTILLED not in (out / "draft" / "README.md").read_text()
    for part in build.PARTS:
        model = AutoModelForCausalLM.from_pretrained(out / part)
        assert model.dtype == torch.bfloat16
        tokenizer = AutoTokenizer.from_pretrained(out / part)
        assert tokenizer.decode(tokenizer("def f(x):\n\treturn é").input_ids) == "def f(x):\n\treturn é"
        assert "heapq" in (out / part / "README.md").read_text()
    assert "of their 4-grams are distinct" in (out / "target" / "README.md").read_text()
    assert json.loads((out / "figures.json").read_text())["draft"]["alpha"] == figures.alpha
    steps.clear()
    shutil.rmtree(out / "first")
    run(with_undistilled=True)
    assert set(steps) == {build.UNDISTILLED}, "finished parts are kept"
    assert f"| {build.UNDISTILLED}, greedy |" in (out / "draft" / "README.md").read_text()


def test_finished_models_are_installed_and_others_stay(tmp_path):
    out, package = tmp_path / "out", tmp_path / "package"
    for folder in (
        out / "target",
        out / "target" / "checkpoint-20",
        out / "eagle3",
        package / "target",
        package / "draft",
    ):
        folder.mkdir(parents=True)
    (out / "target" / build.CARD_FILE).write_text("new")
    (out / "eagle3" / "config.json").write_text("{}")  # still in training: it has no card
    (package / "target" / "old.txt").write_text("old")
    (package / "draft" / build.CARD_FILE).write_text("old")
    installed, missing = build.install(out, package)
    assert installed == ["target"]
    assert {"draft", "eagle3", "dflash", "seq2seq"} < set(missing)
    assert [file.name for file in (package / "target").iterdir()] == [build.CARD_FILE]
    assert (package / "draft" / build.CARD_FILE).read_text() == "old"
    assert not (package / "eagle3").exists()


def interrupt_at(at):
    def interrupt(step, steps, loss):
        if step == at:
            raise KeyboardInterrupt

    return interrupt


def test_a_compiled_run_has_the_losses_of_one_that_is_not(tmp_path, monkeypatch):
    """The compiler is replaced by one that notes what it compiles: the real one takes a minute."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled.append(function) or function)
    ids = np.random.default_rng(0).integers(0, 4096, 4000).astype(np.uint16)
    plain = train(PretrainingRun(TINY, ids, tmp_path / "plain")).state_dict()
    assert compiled == []
    weights = train(PretrainingRun(TINY, ids, tmp_path / "compiled", is_compiled=True)).state_dict()
    assert compiled
    assert all(torch.equal(weights[name], value) for name, value in plain.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_of_either_precision_is_saved_in_bfloat16(tmp_path, dtype):
    ids = np.random.default_rng(0).integers(0, 4096, 4000).astype(np.uint16)
    trained_in = set()

    def compute_loss(ids, logits, next_ids):
        trained_in.add(logits.dtype)
        return compute_next_token_loss(ids, logits, next_ids)

    model = train(PretrainingRun(TINY, ids, tmp_path, compute_loss, dtype=dtype))
    assert trained_in == {dtype}
    saved = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16} == {model.dtype}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path):
    """A resumed run that repeats or skips a batch gives other weights.

    It is cut at either depth, at a seam, in the decay, at its end, and in the further cycle.
    """
    ids = np.random.default_rng(0).integers(0, 4096, 4000).astype(np.uint16)
    whole = train(PretrainingRun(TINY, ids, tmp_path / "whole")).state_dict()
    cut = PretrainingRun(replace(TINY, checkpoint_seconds=0.0), ids, tmp_path / "cut")
    for at in (2, 3, 4, 5, 6, 8, 9):
        with pytest.raises(KeyboardInterrupt):
            train(replace(cut, progress=interrupt_at(at)))
    resumed = train(cut).state_dict()
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name
    assert cut.decay_checkpoints.find_latest() is None
    saved = load_file(tmp_path / "cut" / "model.safetensors")
    assert "lm_head.weight" not in saved, "tied embeddings are stored once"


def test_a_checkpoint_without_its_optimizer_goes_on_at_its_step_and_warms_up_again(tmp_path):
    ids = np.random.default_rng(0).integers(0, 4096, 4000).astype(np.uint16)
    recipe = replace(TINY, checkpoint_seconds=0.0, warmup=2)
    run = PretrainingRun(recipe, ids, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(replace(run, progress=interrupt_at(2)))
    checkpoint = run.checkpoints.find_latest()
    (checkpoint / OPTIMIZER_FILE).unlink()
    saved, steps = load_file(checkpoint / WEIGHTS_FILE), []

    def record_steps(step, steps_total, loss):
        steps.append(step)
        state = run.checkpoints.read_state(run.checkpoints.find_latest())
        assert state["warmup_from"] == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(replace(run, progress=record_steps))
    assert steps == [3]
    trained = load_file(run.checkpoints.find_latest() / WEIGHTS_FILE)
    changes = [(trained[name] - weight).float().abs().max() for name, weight in saved.items()]
    assert 0 < max(changes) < 0.1, "the weights are those of the checkpoint and one small update"


def test_stacking_repeats_the_layers_in_order():
    shallow = untrained(TINY, 2)
    deep = stack_layers(TINY, shallow, 4)
    for i in range(4):
        ours, theirs = deep.model.layers[i].state_dict(), shallow.model.layers[i % 2].state_dict()
        assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert torch.equal(deep.lm_head.weight, shallow.lm_head.weight)


def test_the_rate_warms_up_at_every_depth_and_ends_at_zero():
    recipe = replace(TINY, stages=(TrainStage(1, 16, 100),), warmup=10, decay=0.5)
    assert [make_schedule(recipe, 0, None).compute_scale(step) for step in (0, 4, 9, 50)] == [0.1, 0.5, 1, 1]
    assert make_schedule(recipe, 60, None).compute_scale(60) == 0.1
    falling = [make_schedule(recipe, 0, 100).compute_scale(step) for step in range(100, 151)]
    assert falling[0] == 1
    assert falling[-1] == 0
    assert falling == sorted(falling, reverse=True)
    cyclic = replace(recipe, cycles=((TrainStage(1, 16, 30), TrainStage(1, 32, 10)),))
    again = [make_schedule(cyclic, 150, 150, cycle=1).compute_scale(step) for step in range(150, 191)]
    assert again[0] == 0.1
    assert max(again) == again[8]
    assert again[-1] == 0


def test_a_decay_that_begins_early_is_shorter_and_as_deep():
    early, late = (
        TINY.make_decay_stages(5),
        replace(TINY, stages=(TrainStage(1, 16, 300), TrainStage(2, 16, 200))).make_decay_stages(500),
    )
    assert [(stage.layers, stage.context, stage.steps) for stage in early] == [(2, 16, 2), (2, 32, 1)]
    assert [stage.steps for stage in late] == [240, 60]


def test_another_number_of_tokens_keeps_the_proportions():
    recipe = replace(TARGET_RECIPE, stages=(TrainStage(6, 256, 3000), TrainStage(12, 256, 1000)))
    longer = recipe.scale(3 * recipe.total_tokens, None, "cpu")
    assert [stage.steps for stage in longer.stages] == [9000, 3000]
    assert [stage.steps for stage in longer.cycles[0]] == [3150, 1050]
    on_gpu = recipe.scale(16 * recipe.total_tokens, None, "cuda")
    assert [stage.steps for stage in on_gpu.stages] == [6000, 2000]
    assert on_gpu.batch_tokens == on_gpu.micro_tokens == 8 * recipe.batch_tokens


def test_a_run_finished_early_keeps_its_checkpoint_and_can_go_on(tmp_path):
    ids = np.random.default_rng(0).integers(0, 4096, 4000).astype(np.uint16)
    run = PretrainingRun(replace(TINY, checkpoint_seconds=0.0), ids, tmp_path / "cut", held_out_ids=ids)
    with pytest.raises(KeyboardInterrupt):
        train(replace(run, progress=interrupt_at(2)))
    assert train(run, finish=True).config.num_hidden_layers == 2
    rows = [json.loads(line) for line in (tmp_path / "cut" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["decay_from"] == 2
    assert run.checkpoints.find_latest().name == "checkpoint-2"
    whole = train(replace(run, folder=tmp_path / "whole")).state_dict()
    resumed = train(run).state_dict()
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


def test_a_checkpoint_of_other_batches_is_refused(tmp_path):
    ids = np.random.default_rng(0).integers(0, 4096, 4000).astype(np.uint16)
    run = PretrainingRun(TINY, ids, tmp_path)
    train(run)
    with pytest.raises(ForedraftError, match="give --batch-tokens 64"):
        train(replace(run, recipe=replace(TINY, batch_tokens=128)))


def test_a_signal_saves_a_checkpoint_after_the_step_under_way(tmp_path):
    ids = np.random.default_rng(0).integers(0, 4096, 4000).astype(np.uint16)

    def terminate(step, steps, loss):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    run = PretrainingRun(TINY, ids, tmp_path, progress=terminate)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    assert run.checkpoints.find_latest().name == "checkpoint-3"
    assert signal.getsignal(signal.SIGTERM) is before


def test_every_window_comes_once_in_a_pass_whatever_step_a_run_goes_on_from():
    ids = np.arange(1000).astype(np.uint16)
    batches = WindowBatches(ids, 10, 3, seed=0)
    passes = [[row.tolist() for row in batches.get_batch(i)] for i in range(2 * batches.batches_per_pass)]
    starts = [row[0] for batch in passes[: batches.batches_per_pass] for row in batch]
    assert len(set(starts)) == len(starts) == 99
    assert all(row == list(range(row[0], row[0] + 11)) for batch in passes for row in batch)
    assert [row.tolist() for row in WindowBatches(ids, 10, 3, seed=0).get_batch(40)] == passes[40]
    assert {row[0] % 10 for row in passes[0]} != {row[0] % 10 for row in passes[-1]}


def test_distilling_a_model_into_itself_costs_nothing():
    model = untrained(TINY, 1, torch.float32).eval()
    ids = torch.randint(0, 4096, (2, 8))
    logits = model(ids).logits.flatten(0, 1)
    loss = make_distillation_loss(model)(ids, logits, ids.flatten())
    assert loss.item() == pytest.approx(0, abs=1e-4)


def test_figures_of_a_perfect_draft():
    model = untrained(TINY, 1, torch.float32).eval()
    ids = np.random.default_rng(1).integers(0, 4096, 400).astype(np.uint16)
    figures = measure_pair(model, model, ids, context=32, windows=4)
    assert figures.alpha == pytest.approx(1, abs=1e-5)
    assert figures.lengths == pytest.approx(range(2, 10), abs=1e-3)
    assert figures.greedy_lengths == tuple(range(2, 10))


def test_the_formula_of_the_paper():
    figures = PairMetrics(0, 0, 0.5, 0, (), (), 0)
    assert figures.predict_length(2) == pytest.approx(1 + 0.5 + 0.25)
