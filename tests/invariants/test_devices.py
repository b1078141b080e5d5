"""Every method on a GPU: the tokens of the CPU, without a drafter and with one.

Guards against tensors that are made on the CPU and meet those of the model. Without a GPU a pretended one finds them,
and Triton's kernels have tests of their own.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch

from foredraft import LLM
from tests.invariants.test_lossless import MODES, PROMPTS, ids, tally
from tests.support import tiny_models
from tests.support.method_cases import EACH_CASE, METHOD_CASES
from tests.support.pretend_gpu import DEVICE, pretend_gpu

CHOSEN = [PROMPTS[0], PROMPTS[3]]
SAMPLINGS = {mode: replace(sampling, max_tokens=8) for mode, sampling in MODES.items()}


def use_gpu() -> AbstractContextManager[None]:
    return nullcontext() if torch.cuda.is_available() else pretend_gpu()


def make_llm() -> LLM:
    return LLM(tiny_models.move_copy(tiny_models.target(), DEVICE), None, is_debug=True)


@pytest.mark.parametrize("name", EACH_CASE)
def test_tokens_on_a_gpu_are_those_of_the_cpu(name: str) -> None:
    expected = {mode: ids(tiny_models.plain().generate(CHOSEN, sampling)) for mode, sampling in SAMPLINGS.items()}
    with use_gpu():
        plain = make_llm()
        METHOD_CASES[name].prepare(CHOSEN, plain)
        llm = plain.with_drafter(METHOD_CASES[name].make(3, plain), verify="match")
        accepted = 0
        for mode, sampling in SAMPLINGS.items():
            done = llm.generate(CHOSEN, sampling)
            assert ids(done) == expected[mode]
            accepted += tally(done)[0]
        assert llm.engine.drafter.num_failures == 0
        assert accepted > 0


def test_a_pretended_gpu_refuses_tensors_of_two_devices() -> None:
    with pretend_gpu():
        theirs, ours = torch.arange(3, device="cuda"), torch.arange(3)
        assert theirs.device == DEVICE
        for mix in (lambda: theirs + ours, lambda: torch.cat([ours, theirs]), lambda: theirs.index_select(0, ours)):
            with pytest.raises(RuntimeError, match="tensors on cuda:0 and on the CPU"):
                mix()
        copied = theirs.cpu()
        copied += 1
        assert theirs.tolist() == [0, 1, 2]
        theirs[1] = torch.tensor(7)
        assert (theirs[1:] + theirs.new_ones(2)).tolist() == [8, 3]
