"""Calls that a grammar enforces, on random schemas: every answer parses, and drafts do not change it."""

import pytest

from tests.support.server.random_tools import RandomUse, write_answers
from tests.support.server.scripted_llm import CONTROL, make_control_tokenizer, make_scripted_llm

BATCH = 20


def check_uses(num_uses: int) -> None:
    tokenizer = make_control_tokenizer()
    special_ids = {token: tokenizer.convert_tokens_to_ids(token) for token in CONTROL}
    drafting, plain = make_scripted_llm()[0], make_scripted_llm(has_drafter=False)[0]
    for first in range(0, num_uses, BATCH):
        uses = [RandomUse.from_seed(seed, special_ids) for seed in range(first, min(first + BATCH, num_uses))]
        texts = write_answers(plain, uses)
        assert write_answers(drafting, uses) == texts
        assert [use.find_fault(text) for use, text in zip(uses, texts, strict=True)] == [None] * len(uses)


def test_twenty_random_tools_are_called_as_their_schemas_say():
    check_uses(20)


@pytest.mark.soak
def test_five_hundred_random_tools_are_called_as_their_schemas_say():
    check_uses(500)
