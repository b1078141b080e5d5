"""torch's default dtype belongs to the process, and transformers changes it while it builds a model on another thread.

Fault: buffers of the native code had this dtype. A model that was loaded beside a running one halved them, and the
native code wrote behind their end.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from foredraft import LLM, Sampling

PROMPT = "def fib(n):\n    return"
SAMPLINGS = (
    Sampling(temperature=0, max_tokens=16, ignore_eos=True),
    Sampling(
        temperature=0.9, top_p=0.9, min_p=0.01, seed=3, repetition_penalty=1.1, logit_bias={7: 1.5}, max_tokens=16
    ),
)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("model", "drafters"), [("builtin", ("draft_model", "suffix")), ("builtin-seq2seq", ("eagle",))]
)
def test_it_changes_no_output(model: str, drafters: tuple[str, ...]):
    target = LLM(model, None)
    for drafter in (None, *drafters):
        expected = [target.with_drafter(drafter, 4).generate([PROMPT], s)[0].token_ids for s in SAMPLINGS]
        llm = target.with_drafter(drafter, 4)
        with default_dtype(torch.bfloat16):
            assert [llm.generate([PROMPT], s)[0].token_ids for s in SAMPLINGS] == expected, drafter
