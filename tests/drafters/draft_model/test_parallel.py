"""Draft models of PARD: drafts of the formula from one pass, their folders, and masks for granted nodes alone."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from foredraft import LLM, Sampling
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.creation import create_drafter
from foredraft.drafters.draft_model.drafter import DraftModel
from foredraft.drafters.draft_model.method import METHOD
from foredraft.drafters.draft_model.parallel import ParallelDraftModel
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.request import Batch, Request
from foredraft.tree import TokenTree
from tests.support import tiny_models, tiny_parallel, tiny_vocabularies
from tests.support.requests import make_request
from tests.support.tiny_heads import TRAIN_PROMPTS

PROMPTS = [*TRAIN_PROMPTS, [7, 8, 9], list(range(20, 40))]


@cache
def reference() -> LlamaForCausalLM:
    """Copy the weights into transformers' own modules."""
    model = tiny_models.llama()
    model.load_state_dict(tiny_parallel.model().state_dict())
    return model


@torch.no_grad()
def compute_rows(tokens: list[int], count: int) -> Tensor:
    """Compute the logits [count, V] of the last true token and of the masks behind it, without a cache."""
    ids = torch.tensor([[*tokens, *[tiny_parallel.MASK] * (count - 1)]])
    logits: Tensor = reference()(input_ids=ids, use_cache=False).logits[0, -count:]
    return logits


class Checked(ParallelDraftModel):
    """Drafter that compares every chain with the formula."""

    num_compared = 0

    def propose(self, batch: Batch) -> TokenTree:
        tree = super().propose(batch)
        for b, request in enumerate(batch.requests):
            drafted = tree.tokens[b][1:]
            if not drafted:
                continue
            tokens = request.get_tokens(0, request.num_tokens)
            rows, sampling = compute_rows(tokens, len(drafted)), request.spec.sampling
            assert self.num_valid[request.slot] == request.num_tokens
            if sampling.is_greedy:
                assert drafted == rows.argmax(-1).tolist()
            elif request.spec.rule.uses_q:
                assert tree.q is not None
                first = tree.row_offsets[b]
                q = tree.q[first : first + len(drafted)]
                assert torch.allclose(q, (rows / sampling.temperature).softmax(-1).to(q.dtype), atol=1e-9)
            self.num_compared += 1
        return tree


@pytest.mark.parametrize(("temperature", "verify"), [(0.0, "match"), (0.6, "match"), (0.6, "reject"), (0.6, "block")])
def test_every_chain_of_a_run_is_that_of_the_formula(temperature: float, verify: str) -> None:
    """Entries of masks that stayed in the cache, or another position of a mask, would change the rows."""
    made = tiny_parallel.make_drafter(4)
    drafter = Checked(made.lm, made.context, made.mask_token_id)
    llm = tiny_models.plain().with_drafter(drafter, 4, verify)
    llm.generate(PROMPTS, [Sampling(max_tokens=24, temperature=temperature, seed=i) for i in range(len(PROMPTS))])
    assert drafter.num_compared > 20


def test_later_tokens_of_the_drafts_are_accepted() -> None:
    llm = tiny_models.plain().with_drafter(tiny_parallel.make_drafter(4), 4)
    done = llm.generate(TRAIN_PROMPTS, Sampling(max_tokens=28, temperature=0, ignore_eos=True))
    accepted = [sum(c.stats.accepted_at[i] for c in done if len(c.stats.accepted_at) > i) for i in range(3)]
    assert accepted[2] > 0, accepted


def save(folder: Path, **keys: Any) -> str:
    """Save the model in float32, with other keys in its configuration."""
    model = tiny_models.llama().float()
    model.load_state_dict(tiny_parallel.model().state_dict())
    model.config.update(keys)
    model.save_pretrained(folder)
    return str(folder)


def make(folder: str, **options: Any) -> Any:
    context = DrafterContext(tiny_models.VOCAB, model=folder, dtype=torch.float64, num_speculative_tokens=3)
    return create_drafter(METHOD, METHOD.config(**options), context)


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_the_configuration_decides_unless_the_option_does(tmp_path: Path, key: str) -> None:
    folder = save(tmp_path, **{key: 90})
    chosen = make(folder, parallel=True)
    assert isinstance(chosen, ParallelDraftModel)
    assert chosen.mask_token_id == 90
    assert type(make(folder, parallel=False)) is DraftModel
    found = type(make(folder))
    assert found is (DraftModel if key == "mask_token_id" else ParallelDraftModel), "models of gaps have that key too"


def test_models_without_a_mask_token_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match=r"has no mask token.*needs one of pard_token, ptd_token_id"):
        make(save(tmp_path / "a"), parallel=True)
    with pytest.raises(ForedraftError, match=r"set pard_token in config.json of .* \(0..96\), not 97"):
        make(save(tmp_path / "b", pard_token=97))


def test_a_translated_draft_is_not_parallel(tmp_path: Path) -> None:
    tokenizer = tiny_vocabularies.byte_tokenizer()
    model = tiny_models.llama(vocab_size=len(tokenizer)).float()
    model.config.update({"pard_token": 90})
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path)

    def make_translated(**options: Any) -> Any:
        context = DrafterContext(
            len(tokenizer), model=str(tmp_path), dtype=torch.float64, num_speculative_tokens=3, tokenizer=tokenizer
        )
        return create_drafter(METHOD, METHOD.config(vocab="tli", **options), context)

    assert not isinstance(make_translated(), ParallelDraftModel)
    with pytest.raises(ForedraftError, match="translated drafts are made token by token"):
        make_translated(parallel=True)


def test_native_passes_draft_the_same(tmp_path: Path) -> None:
    target = tmp_path / "target"
    tiny_models.llama().float().save_pretrained(target)
    sampling = [Sampling(max_tokens=24, temperature=0.6 * (i % 2), seed=i) for i in range(len(PROMPTS))]
    plain = LLM(str(target)).generate(PROMPTS, sampling)
    folder = save(tmp_path / "draft", pard_token=tiny_parallel.MASK)
    llm = LLM(str(target), {"method": "draft_model", "model": folder, "parallel": True}, num_speculative_tokens=4)
    assert llm.drafter is not None
    assert llm.drafter.spec.is_native
    done = llm.generate(PROMPTS, sampling)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert sum(c.stats.num_accepted for c in done) > 20


@pytest.mark.parametrize("options", [TreeOptions(tree_nodes=9, top_k=3), TreeOptions(branching=(2, 2, 1, 1))])
def test_masks_take_no_more_positions_than_granted_nodes(options: TreeOptions) -> None:
    """Fault: a tree of depth 4 with 2 granted nodes had 3 masks, behind the pages of its request."""
    drafter = tiny_parallel.make_drafter(4, options)
    drafter.lm.pool.capacity = 64
    request: Request = make_request(0, range(20, 26), Sampling(temperature=0), pages=[3, 1])
    tree = drafter.propose(Batch((request,), (6,), (2,), 4))
    assert len(tree.tokens[0]) == 3
