"""A tiny draft model that drafts in parallel: the perturbed copy of the target, trained on masks for a second."""

from functools import cache
from typing import Any

import torch
from transformers import LlamaForCausalLM

from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.draft_model.parallel import ParallelDraftModel
from foredraft.drafters.draft_model.parallel_training import prepare_parallel
from foredraft.drafters.draft_model.training import DraftTrainee, TrainConfig
from foredraft.drafters.method import DrafterContext
from foredraft.models.hf import HFModel
from foredraft.train.trace import Tracer
from tests.support import tiny_models
from tests.support.devices import TEST_DEVICE, TEST_DTYPE
from tests.support.fit_cache import fit_once
from tests.support.tiny_heads import generate_texts

STEPS, RATE, MASK = 60, 3e-3, tiny_models.VOCAB - 1


@cache
def model() -> LlamaForCausalLM:
    """Fit the weights, on the CPU."""
    network: Any = tiny_models.perturb(tiny_models.llama(), 0.04).to("cpu", torch.float32)
    prepare_parallel(network, MASK)
    network.load_state_dict(fit_once("parallel draft", {"embedding": network.lm_head.weight}, lambda: _fit(network)))
    return network.to(TEST_DTYPE).eval()  # type: ignore[no-any-return]


def _fit(network: Any) -> dict[str, torch.Tensor]:
    llm = tiny_models.plain()
    config = TrainConfig(loss="ce", parallel=True, parallel_tokens=5, mask_token_id=MASK)
    trainee = DraftTrainee(network, llm.target, config)
    optimizer = torch.optim.Adam(network.parameters(), RATE)
    trace = Tracer(llm.target, ()).trace(*generate_texts(llm))
    torch.manual_seed(0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        trainee.compute_loss(trace).total.backward()
        optimizer.step()
    return dict(network.state_dict())


def make_drafter(
    num_tokens: int, options: TreeOptions | None = None, device: torch.device = TEST_DEVICE
) -> ParallelDraftModel:
    context = DrafterContext(tiny_models.VOCAB, num_speculative_tokens=num_tokens, dtype=TEST_DTYPE, device=device)
    lm = HFModel.wrap_model(tiny_models.move_copy(model(), device), "parallel draft")
    return ParallelDraftModel(lm, context, MASK, options)
