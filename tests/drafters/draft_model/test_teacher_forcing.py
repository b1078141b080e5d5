"""Logits of a whole model along a trace: those of each row alone, whatever the lengths of the sources."""

import pytest
import torch

from foredraft.drafters.draft_model.teacher_forcing import compute_trace_logits, pad_sources
from foredraft.drafters.losses import TargetLogProbs, Trace
from foredraft.source import EncoderSource
from tests.support import tiny_models, tiny_seq2seq

TEXT_FAMILIES = tuple(family for family in tiny_seq2seq.FAMILIES if family != "whisper")


def make_trace(sources=()):
    tokens = torch.randint(4, tiny_seq2seq.VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    nothing = TargetLogProbs(torch.zeros(3, 8, 1), None)
    return Trace(tokens, torch.zeros(3, 8, 0), nothing, torch.ones(3, 9, dtype=torch.bool), sources)


def test_shorter_sources_are_padded_and_masked():
    ids, mask = pad_sources([EncoderSource((5, 6)), EncoderSource((7, 8, 0, 9))], torch.device("cpu"))
    assert ids.tolist() == [[5, 6, 0, 0], [7, 8, 0, 9]]
    assert mask.tolist() == [[True, True, False, False], [True] * 4]


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_logits_with_sources_are_those_of_each_row_alone(family):
    model = tiny_seq2seq.make_model(family)
    sources = tuple(EncoderSource(tuple(ids)) for ids in tiny_seq2seq.sources(family, (3, 14, 6)))
    trace = make_trace(sources)
    found = compute_trace_logits(model, trace)
    for row, source in enumerate(sources):
        given = {"input_ids": torch.tensor([source.tokens]), "decoder_input_ids": trace.tokens[row : row + 1, :-1]}
        assert torch.allclose(found[row], model(**given).logits[0], atol=1e-4)
    other = compute_trace_logits(model, make_trace(sources[::-1]))
    assert (found[0] - other[0]).abs().max() > 0.01  # sources matter


def test_logits_without_sources_are_the_models():
    model, trace = tiny_models.llama(), make_trace()
    assert torch.equal(compute_trace_logits(model, trace), model(trace.tokens[:, :-1]).logits)
