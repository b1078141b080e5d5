"""Traces against the model's own modules, and traces on disk against those made on the fly."""

import copy
import errno
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
import torch

from foredraft import Sampling
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel
from foredraft.models.wrap import wrap_model
from foredraft.source import EncoderSource
from foredraft.train import cache as cache_module
from foredraft.train import trace as trace_module
from foredraft.train.cache import TraceCache
from foredraft.train.documents import Document
from foredraft.train.run import train
from foredraft.train.settings import find_trainable
from foredraft.train.trace import Tracer
from foredraft.train.windows import TokenWindows
from tests.support import tiny_models, tiny_seq2seq
from tests.support.train_fakes import LINEAR, plan, weights, write_ids


@pytest.fixture(scope="module")
def target():
    return HFModel.wrap_model(tiny_models.llama(), "target")


@pytest.fixture
def tokens():
    return torch.randint(4, 97, (3, 34), generator=torch.Generator().manual_seed(0))


def reference(tokens, taps):
    model = tiny_models.llama()
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True, use_cache=False)
    states = {0: out.hidden_states[0], 1: out.hidden_states[1], AFTER_FINAL_NORM: out.hidden_states[2]}
    return torch.cat([states[tap] for tap in taps], -1), out.logits.log_softmax(-1)


@pytest.mark.parametrize("rows_at_once", [1 << 20, 40, 10])
@pytest.mark.parametrize("taps", [(), (AFTER_FINAL_NORM,), (0, 1, AFTER_FINAL_NORM)])
def test_a_trace_is_what_the_model_itself_computes(target, tokens, monkeypatch, rows_at_once, taps):
    # 10 positions a pass: a row takes several passes, and sees its keys of the passes before
    monkeypatch.setattr(trace_module, "LOGIT_BYTES", 4 * 97 * rows_at_once)
    trace = Tracer(target, taps).trace(tokens, torch.ones_like(tokens, dtype=torch.bool))
    if taps:
        states, _ = reference(tokens[:, :-1], taps)
        assert torch.allclose(trace.features, states, atol=1e-9)
    assert trace.features.shape[:2] == (3, 33)
    assert torch.allclose(trace.target_log_probs.logprobs.double(), reference(tokens[:, :-1], (0,))[1], atol=1e-5)
    assert not trace.features.is_inference()  # a network has to learn from them
    assert torch.equal(trace.tokens, tokens)


def test_the_top_of_the_distribution_is_its_largest_part(target, tokens):
    mask = torch.ones_like(tokens, dtype=torch.bool)
    whole, top = (Tracer(target, (), k).trace(tokens, mask).target_log_probs for k in (None, 5))
    assert whole.token_ids is None
    assert torch.equal(whole.logprobs.topk(5).values, top.logprobs)
    assert torch.equal(whole.logprobs.gather(-1, top.token_ids), top.logprobs)


def test_a_trace_does_not_depend_on_the_precision_of_training(tokens):
    target = HFModel.wrap_model(tiny_models.llama().float(), "target")
    features, log_probs = Tracer(target, (AFTER_FINAL_NORM,)).run_target(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, mixed_log_probs = Tracer(target, (AFTER_FINAL_NORM,)).run_target(tokens)
    assert torch.equal(features, mixed)
    assert torch.equal(log_probs.logprobs, mixed_log_probs.logprobs)


def test_tracing_leaves_the_memory_of_requests_alone(tokens):
    llm = tiny_models.plain()
    before = llm.generate([[5, 6, 7]], Sampling(temperature=0, max_tokens=20))[0].token_ids
    Tracer(llm.target).run_target(tokens)
    assert llm.generate([[5, 6, 7]], Sampling(temperature=0, max_tokens=20))[0].token_ids == before


def make_cache(tmp_path, target, identity="a", top=7, taps=(AFTER_FINAL_NORM,)):
    rng = np.random.default_rng(0)
    windows = TokenWindows.pack([Document(rng.integers(4, 97, 40)) for _ in range(30)], 8)
    return TraceCache(tmp_path / "traces", windows, Tracer(target, taps, top), {"of": identity})


def prepare(cache, log=lambda line: None):
    cache.prepare(log, len(cache.windows))
    return cache


class CountingTracer(Tracer):
    """Tracer that records the shape of every pass for states."""

    def __init__(self, *args):
        super().__init__(*args)
        self.passes = []

    def compute_states(self, tokens, layers, sources=()):
        self.passes.append((len(tokens), tuple(layers)))
        return super().compute_states(tokens, layers, sources)


@pytest.mark.parametrize("taps", [(AFTER_FINAL_NORM,), (1, 0), (), (2, AFTER_FINAL_NORM, 1)])
def test_a_cached_trace_is_the_trace(tmp_path, target, taps):
    cache, messages = make_cache(tmp_path, target, taps=taps), []
    prepare(cache, messages.append)
    rows = [0, 17, 5, len(cache.windows) - 1]
    for attempt in range(2):  # computed, then from disk
        kept, live = cache.read(rows, attempt), cache.tracer.trace(*cache.windows.read(rows))
        assert torch.equal(kept.features, live.features)
        assert torch.allclose(kept.target_log_probs.logprobs, live.target_log_probs.logprobs, atol=1e-5)
        assert torch.equal(kept.target_log_probs.token_ids, live.target_log_probs.token_ids)
        assert torch.equal(kept.tokens, live.tokens)
        assert torch.equal(kept.mask, live.mask)
    assert "MB more in" in messages[0]


def test_the_estimate_of_the_disk_space_is_what_all_rows_take(tmp_path, target):
    cache, messages = make_cache(tmp_path, target, taps=(0, 1)), []
    prepare(cache, messages.append)
    cache.read(range(len(cache.windows)), 0)
    size = sum(file.stat().st_size for file in (tmp_path / "traces").glob("*.states"))
    assert f"states of {len(cache.windows):,} rows take up to {size / 1e6:.1f} MB more in" in messages[0]
    prepare(cache, messages.append)
    assert "take up to 0.0 MB more in" in messages[1]


def test_rows_that_other_runs_stored_do_not_lower_the_estimate(tmp_path, target, monkeypatch):
    """They may be other rows than those of this run."""
    cache = prepare(make_cache(tmp_path, target))
    cache.read([0, 1, 2, 3], 0)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    with pytest.raises(ForedraftError, match="leave --cache out"):
        cache.prepare(lambda line: None, 4)


def test_a_row_is_computed_once_and_other_boundaries_of_it_when_they_are_needed(tmp_path, target):
    windows = make_cache(tmp_path, target).windows
    read = lambda taps, rows: TraceCache(tmp_path / "traces", windows, taps, {}).read(rows, 0)  # noqa: E731
    first, second = CountingTracer(target, (1,), 7), CountingTracer(target, (1, 2), 7)
    prepare(TraceCache(tmp_path / "traces", windows, first, {}))
    read(first, [3, 4])
    read(first, [4, 3])
    read(first, [3, 9])
    assert first.passes == [(2, (1, AFTER_FINAL_NORM)), (1, (1, AFTER_FINAL_NORM))]
    trace = read(second, [4, 9])
    assert second.passes == [(2, (1, 2, AFTER_FINAL_NORM))]
    assert torch.equal(trace.features, second.trace(*windows.read([4, 9])).features)
    read(CountingTracer(target, (2,), 7), [9])


def test_states_without_distributions_are_those_of_the_trace(target, monkeypatch):
    monkeypatch.setattr(trace_module, "STATE_POSITIONS", 20)  # several pieces: whole rows, then parts of rows
    tracer = Tracer(target, (2, 0, AFTER_FINAL_NORM), 7)
    for length in (8, 33):
        tokens = torch.randint(4, 97, (5, length), generator=torch.Generator().manual_seed(length))
        states, probs = tracer.run_target(tokens)
        assert torch.allclose(tracer.compute_states(tokens, tracer.hidden_layers), states, atol=1e-6)
        exact = tracer.compute_probs(states[..., -target.hidden_size :])
        assert torch.allclose(exact.logprobs, probs.logprobs, atol=1e-5)
        assert torch.equal(exact.token_ids, probs.token_ids)


def test_traces_of_something_else_are_refused(tmp_path, target):
    prepare(make_cache(tmp_path, target))
    with pytest.raises(ForedraftError, match="have other settings: of was 'a' and is 'b'; give another --cache"):
        prepare(make_cache(tmp_path, target, identity="b"))


def test_a_folder_of_other_files_is_no_cache(tmp_path, target):
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "letter.txt").write_text("dear")
    with pytest.raises(ForedraftError, match="is not empty and holds no traces"):
        prepare(make_cache(tmp_path, target))


def test_a_full_disk_is_seen_before_it_is_full(tmp_path, target, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    with pytest.raises(ForedraftError, match=r"states need .* MB and .* has 0\.0 MB free; leave --cache out"):
        prepare(make_cache(tmp_path, target))


def test_a_disk_that_becomes_full_is_named_and_no_row_is_marked(tmp_path, target, monkeypatch):
    cache = prepare(make_cache(tmp_path, target))

    def write(file, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "_write", write)
        with pytest.raises(ForedraftError, match="the same command continues with these rows"):
            cache.read([1], 0)
    live = cache.tracer.trace(*cache.windows.read([1]))
    assert torch.equal(cache.read([1], 0).features, live.features)


def test_a_damaged_file_is_named_and_recovers_as_the_message_says(tmp_path, target):
    cache = prepare(make_cache(tmp_path, target))
    before = cache.read([0, 1], 0)
    file = tmp_path / "traces" / "boundary-final.states"
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ForedraftError, match=r"boundary-final\.states are damaged; delete boundary-final\.rows"):
        cache.read([1], 0)
    (tmp_path / "traces" / "boundary-final.rows").unlink()
    assert torch.equal(cache.read([0, 1], 0).features, before.features)


@pytest.mark.parametrize("settings", [{}, {"taps": "[0]"}])
def test_a_run_on_cached_traces_learns_the_same(tmp_path, settings):
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    write_ids(tmp_path)
    cache, same = str(tmp_path / "traces"), {"settings": {"loss": "kl", **settings}, "top": 20}
    train(plan(tmp_path, "other", cache=cache, settings={"loss": "kl"}, max_steps=2), method=LINEAR)  # shares the cache
    live = weights(train(plan(tmp_path, "live", **same), method=LINEAR).folder)
    kept = weights(train(plan(tmp_path, "kept", cache=cache, **same), method=LINEAR).folder)
    again = weights(train(plan(tmp_path, "again", cache=cache, **same), method=LINEAR).folder)
    for name in live:
        assert torch.allclose(live[name], kept[name], atol=1e-4)
        assert torch.equal(kept[name], again[name])
    with pytest.raises(ForedraftError, match="have other settings: dtype was"):
        train(replace(plan(tmp_path, "half", cache=cache, **same), dtype="bfloat16"), method=LINEAR)


@pytest.fixture(scope="module", params=["t5", "bart"])
def seq2seq(request):
    return tiny_seq2seq.make_model(request.param)


def make_sources(count, seed=0):
    lengths = (5, 17, 9, 2)[:count]
    return tuple(EncoderSource(tuple(ids)) for ids in tiny_seq2seq.sources("t5", lengths, seed))


def compute_seq2seq_reference(model, tokens, sources, taps):
    """Run transformers' own forward pass over each row alone."""
    states, log_probs = [], []
    for row, source in zip(tokens, sources, strict=True):
        with torch.no_grad():
            out = model(
                input_ids=torch.tensor([source.tokens]), decoder_input_ids=row[None], output_hidden_states=True,
                use_cache=False,
            )  # fmt: skip
        layers = dict(zip((0, 1, AFTER_FINAL_NORM), out.decoder_hidden_states, strict=True))
        states.append(torch.cat([layers[tap][0] for tap in taps], -1))
        log_probs.append(out.logits[0].log_softmax(-1))
    return torch.stack(states), torch.stack(log_probs)


def draw_rows(count=3, length=34):
    tokens = torch.randint(4, tiny_seq2seq.VOCAB, (count, length), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = tiny_seq2seq.START
    return tokens


@pytest.mark.parametrize("rows_at_once", [1 << 20, 40, 10])
def test_a_trace_with_sources_is_what_the_model_itself_computes(seq2seq, monkeypatch, rows_at_once):
    monkeypatch.setattr(trace_module, "LOGIT_BYTES", 4 * tiny_seq2seq.VOCAB * rows_at_once)
    tokens, sources, taps = draw_rows(), make_sources(3), (0, 1, AFTER_FINAL_NORM)
    tracer = Tracer(wrap_model(seq2seq, "target"), taps)
    for _ in range(2):  # the memory is used again
        trace = tracer.trace(tokens, torch.ones_like(tokens, dtype=torch.bool), sources)
    states, log_probs = compute_seq2seq_reference(seq2seq, tokens[:, :-1], sources, taps)
    assert torch.allclose(trace.features, states, atol=1e-4)  # T5 squares its states in float32
    assert torch.allclose(trace.target_log_probs.logprobs.double(), log_probs, atol=1e-4)
    assert trace.sources == sources


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_native_traces_with_sources_are_close_to_the_model(seq2seq, dtype, error):
    model = copy.deepcopy(seq2seq).to(dtype)
    target = wrap_model(model, "target", is_fused=True)
    assert target.native is not None
    tokens, sources = draw_rows(), make_sources(3)
    features, found = Tracer(target, (1, AFTER_FINAL_NORM)).run_target(tokens, sources)
    states, log_probs = compute_seq2seq_reference(model.double(), tokens, sources, (1, AFTER_FINAL_NORM))
    assert (found.logprobs.double().exp() - log_probs.exp()).abs().max() < error
    assert (features.double() - states).abs().mean() < error * states.abs().mean()


def make_seq2seq_windows(context=12):
    rng, documents = np.random.default_rng(0), []
    for i, source in enumerate(tiny_seq2seq.sources("t5", tuple(2 + i % 7 for i in range(30)))):
        ids = np.array([tiny_seq2seq.START, *rng.integers(4, tiny_seq2seq.VOCAB, 3 + i % 8), tiny_seq2seq.EOS])
        documents.append(Document(ids, np.arange(len(ids)) >= 1, tuple(source)))
    return TokenWindows.pack(documents, context)


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3", "chimera", "hydra", "draft_model"])
def test_columns_of_padding_change_no_loss(seq2seq, method):
    target, windows, rows = wrap_model(seq2seq, "target"), make_seq2seq_windows(16), [0, 5, 17]
    config = find_trainable(method).training.config
    sizes = {
        "eagle": {"noise": 0.0},
        "draft_model": {"hidden": 16},
        "eagle3": {"taps": (1,)},
        "chimera": {"taps": (1, -1)},
    }.get(method, {})
    trainee = find_trainable(method).training.create_trainee(config(**sizes), target)
    if trainee.spec.prepare is not None:
        trainee.spec.prepare(torch.ones(tiny_seq2seq.VOCAB, dtype=torch.int64))
    trainee.network.eval()
    tracer = Tracer(target, trainee.spec.hidden_layers)
    short, whole = tracer.trace_rows(windows, rows), tracer.trace(*windows.read(rows), windows.get_sources(rows))
    assert short.tokens.shape[1] == 10 < whole.tokens.shape[1] == 17
    losses = [trainee.compute_loss(trace).total.item() for trace in (short, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_cached_trace_with_sources_is_the_trace(tmp_path, seq2seq):
    windows = make_seq2seq_windows()
    cache = TraceCache(
        tmp_path / "traces", windows, Tracer(wrap_model(seq2seq, "target"), (1, AFTER_FINAL_NORM), 7), {}
    )
    prepare(cache)
    for rows in ([0, 17, 5, len(windows) - 1], [0, 8], [7]):
        kept, live = cache.read(rows, 0), cache.tracer.trace_rows(windows, rows)
        assert torch.allclose(kept.features.double(), live.features.double(), rtol=1e-4, atol=1e-6)
        assert torch.allclose(kept.target_log_probs.logprobs, live.target_log_probs.logprobs, atol=1e-5)
        assert torch.equal(kept.target_log_probs.token_ids, live.target_log_probs.token_ids)
        assert torch.equal(kept.tokens, live.tokens)
        assert torch.equal(kept.mask, live.mask)
        sources = [source.tokens for source in kept.sources]
        assert sources == [source.tokens for source in live.sources] == [windows.sources[row] for row in rows]
