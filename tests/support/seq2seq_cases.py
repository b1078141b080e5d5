"""Drafters of every method for a tiny encoder-decoder target: copies of the target with noise, and heads with noise."""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from foredraft import LLM
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.blockwise import method as blockwise
from foredraft.drafters.chimera import method as chimera
from foredraft.drafters.dflash import method as dflash
from foredraft.drafters.eagle import method as eagle
from foredraft.drafters.eagle3 import method as eagle3
from foredraft.drafters.ensemble.drafter import EnsembleDrafter
from foredraft.drafters.ensemble.members import EnsembleMember
from foredraft.drafters.ensemble.selector import SelectionMode
from foredraft.drafters.hydra import method as hydra
from foredraft.drafters.interface import Drafter
from foredraft.drafters.medusa import method as medusa
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.mlp_speculator import method as mlp_speculator
from foredraft.drafters.registry import load_methods
from foredraft.engine.sandbox import SandboxedDrafter
from tests.support import tiny_seq2seq

Make = Callable[[LLM, int], Drafter]


def make_factory(method: str, **options: Any) -> Make:
    def make(llm: LLM, num_tokens: int) -> Drafter:
        entry = load_methods()[method]
        context = DrafterContext(llm.target.vocab_size, llm.target, num_tokens, dtype=llm.target.model.dtype)
        made: Drafter = entry.create(entry.config(**options), context)
        return made

    return make


def make_pair_factory(noise: float = 0.05, **options: Any) -> Make:
    """Make a copy of the target whose weights have noise of so many standard deviations."""

    def make(llm: LLM, num_tokens: int) -> Drafter:
        copied = tiny_seq2seq.perturb(llm.target.model, noise)
        return tiny_seq2seq.draft_model(num_tokens, model=copied, **options)

    return make


def make_head_factory(module: Any, training: dict[str, Any], **options: Any) -> Make:
    """Make an untrained head and add noise: it has a different distribution after every path."""

    def make(llm: LLM, num_tokens: int) -> Drafter:
        target = llm.target
        trainee = module.create_trainee(module.TrainConfig(**training), target)
        if trainee.spec.prepare is not None:
            trainee.spec.prepare(torch.ones(target.vocab_size, dtype=torch.int64))
        network = trainee.network.to(target.model.dtype)
        generator = torch.Generator().manual_seed(4)
        tensors = {
            name: weight.detach() + 0.5 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            if weight.is_floating_point()
            else weight
            for name, weight in network.state_dict().items()
        }
        checkpoint = Checkpoint(module.METHOD.name, "made", "made", network.shape, tensors)
        context = DrafterContext(target.vocab_size, target, num_tokens, dtype=target.model.dtype)
        made: Drafter = module.from_checkpoint(module.Config(**options), checkpoint, context)
        return made

    return make


def make_ensemble_factory(*makers: Make, mode: SelectionMode) -> Make:
    """Make an ensemble. Its clock counts its calls, so that every run makes the same choices."""

    def make(llm: LLM, num_tokens: int) -> Drafter:
        drafters = [maker(llm, num_tokens) for maker in makers]
        members = [
            EnsembleMember(str(i), drafter, SandboxedDrafter(drafter, llm.target.vocab_size, name=str(i)))
            for i, drafter in enumerate(drafters)
        ]
        ticks = itertools.count()
        return EnsembleDrafter(members, mode, "made", clock=lambda: 1e-3 * next(ticks))

    return make


MADE: dict[str, Make] = {
    "aggressive": make_factory("aggressive"),
    "blockwise": make_head_factory(blockwise, {"heads": 3, "inner": 8}),
    "chimera": make_head_factory(chimera, {"taps": (1, -1), "heads": 2}),
    "dflash": make_head_factory(dflash, {"taps": (1,), "num_layers": 1, "block_size": 5}),
    "draft_model": make_pair_factory(),
    "draft_model, tree": make_pair_factory(branching=(2, 2, 1, 1)),
    "draft_model, free tree": make_pair_factory(tree_nodes=7, top_k=3),
    "eagle": make_head_factory(eagle, {}),
    "eagle, tree": make_head_factory(eagle, {}, tree_nodes=7, top_k=3),
    "eagle3": make_head_factory(eagle3, {"taps": (1,)}),
    "hydra": make_head_factory(hydra, {"heads": 3, "own_head": False, "rank": 12}),
    "lookahead": make_factory("lookahead"),
    "medusa, tree": make_head_factory(medusa, {"heads": 3}, tree_nodes=7),
    "mlp_speculator": make_head_factory(mlp_speculator, {"n_predict": 3, "inner": 12, "tied": False}),
    "ngram": make_factory("ngram", prompt_lookup_min=1),
    "ngram_lm": make_factory("ngram_lm", min_confidence=0.01),
    "suffix": make_factory("suffix", min_confidence=0.01),
    "token_recycling": make_factory("token_recycling", nodes=6),  # 80 nodes do not fit a small cache
}
# A draft that often disagrees: the other one agrees with the smallest targets too often for a count to see any fault.
OTHER_PAIR = make_pair_factory(noise=1.0)
# Generalised aggressive decoding (2205.10350): copies of the source beside a block-parallel drafter
ENSEMBLES: dict[str, Make] = {
    "aggressive+blockwise": make_ensemble_factory(MADE["aggressive"], MADE["blockwise"], mode="auto"),
    "aggressive+blockwise, merge": make_ensemble_factory(MADE["aggressive"], MADE["blockwise"], mode="merge"),
    "aggressive+draft_model, sequence": make_ensemble_factory(MADE["aggressive"], OTHER_PAIR, mode="sequence"),
    "aggressive+medusa, merge": make_ensemble_factory(MADE["aggressive"], MADE["medusa, tree"], mode="merge"),
}
