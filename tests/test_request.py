"""Requests: what is given once in the spec, and what follows from it and from the output."""

from dataclasses import fields

import pytest

from foredraft.request import Request
from foredraft.request_spec import RequestSpec
from foredraft.sampling.params import Sampling
from foredraft.source import EncoderSource
from tests.support.requests import make_request

PROMPT, OUTPUT = (3, 4, 5), [6, 7, 8, 9]


def test_every_fact_is_in_one_place() -> None:
    """A name of the spec is no name of the request, so there is one way to reach it."""
    of_spec = {name for name in dir(RequestSpec) if not name.startswith("_")}
    of_request = {field.name for field in fields(Request)} | set(dir(Request))
    assert {field.name for field in fields(RequestSpec)} <= of_spec
    assert not of_spec & of_request


@pytest.mark.parametrize("num_output", range(len(OUTPUT) + 1))
def test_tokens_are_prompt_and_output(num_output: int) -> None:
    request = make_request(0, PROMPT, Sampling(), output=OUTPUT[:num_output])
    tokens = [*PROMPT, *OUTPUT[:num_output]]
    assert request.tokens == tokens
    assert request.num_tokens == len(tokens)
    assert [request.get_token(i) for i in range(len(tokens))] == tokens
    for start in range(len(tokens) + 1):
        for stop in range(start, len(tokens) + 2):
            assert request.get_tokens(start, stop) == tokens[start:stop]


@pytest.mark.parametrize(
    ("max_tokens", "max_length", "depth"), [(10, 100, 5), (5, 100, 0), (4, 100, -1), (10, 9, 1), (10, 7, -1)]
)
def test_a_draft_leaves_room_for_one_token(max_tokens: int, max_length: int, depth: int) -> None:
    request = make_request(0, PROMPT, Sampling(max_tokens=max_tokens), output=OUTPUT, max_length=max_length)
    assert request.max_draft_depth == depth


def test_the_input_is_the_encoders_source_if_it_has_tokens() -> None:
    for source, expected in ((None, PROMPT), (EncoderSource(), PROMPT), (EncoderSource((1, 2)), (1, 2))):
        assert RequestSpec(PROMPT, Sampling(), 0, source=source).input_tokens == expected


def test_end_ids_are_those_of_the_request_and_of_the_model() -> None:
    for ignores, expected in ((False, {1, 2, 3}), (True, {1, 2})):
        sampling = Sampling(stop_token_ids=(1, 2), ignore_eos=ignores)
        assert RequestSpec(PROMPT, sampling, 0, eos_ids=frozenset({3})).end_ids == expected
