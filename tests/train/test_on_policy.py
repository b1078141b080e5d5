"""On-policy rows of an encoder-decoder draft: every row continues its first tokens, after its source."""

import numpy as np
import pytest
import torch

from foredraft import LLM, Sampling
from foredraft.models.wrap import wrap_model
from foredraft.source import PreparedPrompt
from foredraft.train.documents import Document
from foredraft.train.on_policy import OnPolicySource
from foredraft.train.run import OnlineTraceSource
from foredraft.train.trace import Tracer
from foredraft.train.windows import TokenWindows
from tests.support import tiny_seq2seq


@pytest.fixture(scope="module")
def model():
    return tiny_seq2seq.make_model("t5")


def make_source(model, share):
    documents = []
    for i, source in enumerate(tiny_seq2seq.sources("t5", (3, 8, 5))):
        ids = np.array([tiny_seq2seq.START, 7, *range(10, 14 + i), tiny_seq2seq.EOS])
        documents.append(Document(ids, np.arange(len(ids)) >= 1 + i % 2, tuple(source)))  # prefixes of 1 and 2 tokens
    windows = TokenWindows.pack(documents, 20)
    tracer = Tracer(wrap_model(model, "target"))
    return OnPolicySource(OnlineTraceSource(windows, tracer), windows, tracer, share, 5, lambda: model)


def test_the_draft_continues_the_first_tokens_after_the_rows_own_source(model):
    """The draft is the target here, so its sequences are those of requests."""
    source = make_source(model, 1.0)
    trace = source.read([0, 1, 2], step=4)
    data, _, sources = source.windows.read_with_sources([0, 1, 2])
    assert trace.tokens.shape == data.shape
    for row, (start, encoder_source) in enumerate(zip((1, 2, 1), sources, strict=True)):
        sampling = Sampling(temperature=1.0, max_tokens=data.shape[1] - start, seed=(5 + 4) * 3 + row)
        prompt = PreparedPrompt(encoder_source, data[row, :start].tolist())
        [expected] = LLM(model, None).generate([prompt], sampling)
        stop = start + len(expected.token_ids)
        assert trace.tokens[row].tolist() == [
            *prompt.tokens, *expected.token_ids, *[0] * (data.shape[1] - stop)
        ]  # fmt: skip
        assert trace.mask[row].nonzero().flatten().tolist() == list(range(start, stop))
    assert [each.tokens for each in trace.sources] == list(source.windows.sources)


def test_the_share_chooses_the_steps(model):
    never = make_source(model, 0.0)
    assert torch.equal(never.read([0, 1], step=1).tokens, never.windows.read_with_sources([0, 1])[0])
    half = make_source(model, 0.5)
    data = half.windows.read_with_sources([0, 1])[0]
    changed = [not torch.equal(half.read([0, 1], step).tokens, data) for step in range(12)]
    assert 2 <= sum(changed) <= 10
    assert changed == [not torch.equal(half.read([0, 1], step).tokens, data) for step in range(12)]
