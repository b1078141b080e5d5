"""Generation with recorded draft loops: the tokens and the acceptance of growth level by level."""

from typing import Any

import pytest
import torch

from foredraft import LLM, Sampling
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.method import DrafterContext
from foredraft.kernels.gpu.graphs import CallingRecorder
from tests.support import tiny_heads, tiny_models
from tests.support.draft_loops import record_loops
from tests.support.torch_kernels import make_torch_kernels

SHARED = [7, 8, 9, 5, 6] * 4  # prompts share a page
PROMPTS = [[33], [*SHARED, 44], [*SHARED, 61, 62, 63]]
SAMPLINGS = [
    Sampling(max_tokens=8, temperature=0, ignore_eos=True),
    Sampling(max_tokens=6, temperature=0.6, top_p=0.9, seed=11),
]


def make_eagle() -> Any:
    plain = tiny_models.plain()
    method, checkpoint = tiny_heads.EAGLE.method, tiny_heads.EAGLE.get_checkpoint(plain)
    assert isinstance(checkpoint, Checkpoint)
    context = DrafterContext(tiny_models.VOCAB, plain.target, 4, dtype=torch.float64, fused=False)
    make: Any = method.from_checkpoint
    return make(method.config(tree_nodes=10, top_k=3), checkpoint, context)


def make_draft_model() -> Any:
    return tiny_models.draft_model(4, options=TreeOptions())


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (make_eagle, "match"),
        (make_draft_model, "reject"),
        pytest.param(make_eagle, "reject", marks=pytest.mark.soak),
        pytest.param(make_draft_model, "match", marks=pytest.mark.soak),
    ],
)
def test_generation_with_loops(make: Any, rule: str) -> None:
    results = []
    for has_loop in (True, False):
        with record_loops(CallingRecorder(), make_torch_kernels()):
            drafter = make()
        drafter.lm.pool.is_whole = True
        loop = drafter.loop if has_loop else None
        drafter.loop = loop
        llm: LLM = tiny_models.plain().with_drafter(drafter, verify=rule)
        done = [one for sampling in SAMPLINGS for one in llm.generate(PROMPTS, sampling)]
        done += llm.generate(PROMPTS[1:3], SAMPLINGS)  # after hits in the prefix cache
        results.append([(one.token_ids, one.stats.num_drafted, one.stats.num_accepted) for one in done])
        assert loop is None or (loop.num_replays > 5 and not loop.refusals)
        assert llm.engine.drafter.num_failures == 0
    assert results[0] == results[1]
    assert sum(accepted for _, _, accepted in results[0]) > 0
