"""Self-speculation on the target's own memory: what it leaves there, how right it is, which layer it leaves at, what it
refuses, and what its adapter learns.
"""

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import LLM, Sampling
from foredraft.checkpoints.schema import TargetInfo
from foredraft.drafters.checkpoint_folders import read, recognise, write
from foredraft.drafters.early_exit import layer_selection
from foredraft.drafters.early_exit import method as early_exit
from foredraft.drafters.early_exit.checkpoint import EarlyExitShape
from foredraft.drafters.early_exit.drafter import EarlyExit
from foredraft.drafters.early_exit.layer_selection import (
    FixedExitLayer,
    MeasuredExitLayer,
    estimate_cost,
    estimate_speed,
)
from foredraft.drafters.losses import LOSS_NAMES
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.llm import MemoryLimits
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.truncated import Truncated
from foredraft.request import Request
from foredraft.train.config import EvaluationConfig
from foredraft.train.data import DocumentReader
from foredraft.train.documents import hold_out
from foredraft.train.evaluate import select_prompts
from foredraft.train.run import train
from tests.support import tiny_models
from tests.support.kv_comparison import KVSimulation
from tests.support.library_setups import NATIVE
from tests.support.method_cases import METHOD_CASES
from tests.support.tiny_heads import EARLY_EXIT, generate_texts, make_trace
from tests.support.train_fakes import plan as training_plan
from tests.support.train_fakes import write_ids

GREEDY = Sampling(max_tokens=41, temperature=0, ignore_eos=True)
PROMPTS = [[33], [5, 6, 7, 8, 9, 5, 6, 7], [50] * 20]
LAYERS, SETTLED = 8, 4


def settling(layers: int = LAYERS, settled: int = SETTLED) -> LlamaForCausalLM:
    """Make a target whose layers after the first `settled` add nothing to the hidden states."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=tiny_models.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=tiny_models.CONTEXT,
        initializer_range=0.3, bos_token_id=None, eos_token_id=3, head_dim=16,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for layer in model.model.layers[settled:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


@cache
def target() -> LLM:
    return LLM(settling(), None, is_debug=True)


@cache
def native(dtype: torch.dtype) -> LLM:
    return LLM(settling(4, 3).to(dtype), None, is_debug=True, fused=True)


def context(llm: LLM, num_tokens: int = 4) -> DrafterContext:
    return DrafterContext(tiny_models.VOCAB, llm.target, num_tokens, dtype=llm.target.model.dtype)


def drafting(llm: LLM, verify: str = "match", num_tokens: int = 4, **options: Any) -> LLM:
    made = early_exit.create(early_exit.Config(**options), context(llm, num_tokens))
    return llm.with_drafter(made, verify=verify)


# what it leaves in the target's memory


class ExitLife(KVSimulation):
    """A simulation in which the draft's KV is the target's KV, which is compared already."""

    def compare_draft(self, request: Request) -> int:
        return request.num_computed


@pytest.mark.parametrize("verify", ["match", "reject", "block"])
@pytest.mark.parametrize("name", ["early_exit", "early_exit, tree", "early_exit, adapter"])
def test_the_targets_memory_equals_a_recomputation_after_every_step(name: str, verify: str) -> None:
    """Through arrivals, hits in the prefix cache, preemptions and aborts, with drafts of every length."""
    if verify == "block" and not METHOD_CASES[name].is_chain:
        pytest.skip("block verification takes chains")
    life = ExitLife(METHOD_CASES[name].make(4), verify, seed=len(name))
    for _ in range(100):
        life.step()
    life.llm.target.pool.check_null_page(life.llm.limits.page_size)
    tally = life.tally
    assert life.engine.drafter.num_failures == 0
    assert tally.difference <= 1e-12
    assert min(tally.accepted, tally.rejected, tally.preempted, tally.found, tally.finished, tally.aborted) > 0


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"tree_nodes": 8, "top_k": 3}, {"branching": (3, 2, 1)}], ids=str)
def test_every_bit_of_the_memory_is_that_of_reading_the_text(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The first layers' keys and values are written twice, by the draft and by the pass that verifies it."""
    llm = drafting(native(dtype), exit_layer=1, **options)
    transcripts = [llm.prepare(prompt, GREEDY)[0] for prompt in PROMPTS]
    for transcript in transcripts:
        llm.engine.add(transcript)
    for _ in range(9):
        llm.engine.step()
        for transcript in transcripts:
            request = transcript.request
            read_once = _read(native(dtype), request.tokens[: request.num_computed])
            for held, wanted in zip(_read_kv(llm, request), read_once, strict=True):
                assert torch.equal(held, wanted)
    assert sum(t.num_accepted for t in transcripts) > 0
    assert sum(t.num_drafted - t.num_accepted for t in transcripts) > 0


def _read_kv(llm: LLM, request: Request) -> list[Tensor]:
    size = llm.limits.page_size
    slots = torch.tensor([request.pages[i // size] * size + i % size for i in range(request.num_computed)])
    return [one[slots] for layer in sorted(llm.target.pool.layers) for one in llm.target.pool.layers[layer]]


def _read(llm: LLM, tokens: list[int]) -> list[Tensor]:
    lm = llm.target.with_new_kv()
    pages = range(1, 2 + len(tokens) // 16)
    lm.forward(ForwardBatch.build([Span(pages, 0, tokens, range(len(tokens)))], [0], 16, "cpu"))
    return [one[16 : 16 + len(tokens)] for layer in sorted(lm.pool.layers) for one in lm.pool.layers[layer]]


def test_a_pass_that_fails_while_a_draft_grows_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft writes a part of its KV to the slots that the target writes next."""
    expected = [c.token_ids for c in target().generate(PROMPTS, GREEDY)]
    whole, count = Truncated.forward, 0

    def failing(self: Truncated, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count in (3, 6):
            raise RuntimeError("now and then")
        return whole(self, *args)

    monkeypatch.setattr(Truncated, "forward", failing)
    llm = drafting(target(), exit_layer=2)
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected
    assert llm.engine.drafter.num_failures == 2


# how right it is


@pytest.mark.parametrize("verify", ["match", "reject", "block"])
def test_a_target_that_has_settled_is_foreseen_and_one_that_has_not_is_not(verify: str) -> None:
    """If a root's position or page is off by one, some draft is rejected."""
    for done in drafting(target(), verify, exit_layer=SETTLED).generate(PROMPTS, GREEDY):
        assert done.stats.num_accepted == done.stats.num_drafted
        assert done.stats.acceptance_length > 4
    early = drafting(target(), verify, exit_layer=1).generate(PROMPTS, GREEDY)
    assert sum(c.stats.num_drafted - c.stats.num_accepted for c in early) > 0


@pytest.mark.parametrize("verify", ["match", "reject", "block"])
def test_sampled_drafts_of_a_settled_target_are_kept(verify: str) -> None:
    """q is p: no draft token is ever rejected."""
    sampling = Sampling(max_tokens=40, temperature=1, top_p=0.9, seed=3, ignore_eos=True)
    done = drafting(target(), verify, exit_layer=SETTLED).generate(PROMPTS, sampling)
    assert all(c.stats.num_accepted == c.stats.num_drafted > 0 for c in done)


def test_a_prompt_is_drafted_for_a_step_later_and_a_single_token_at_once() -> None:
    """States that the target has not computed cannot be read; no other pass computes them."""
    llm = drafting(target(), exit_layer=SETTLED)
    [one] = llm.generate([[33]], Sampling(max_tokens=10, temperature=0, ignore_eos=True))
    [more] = llm.generate([[50] * 7], Sampling(max_tokens=10, temperature=0, ignore_eos=True))
    assert one.stats.target_passes == 2
    assert more.stats.target_passes == 3


# exit layer


def test_worth_is_tokens_per_pass_of_the_best_length() -> None:
    assert estimate_speed(0.0, 0.5, 8) == 1.0
    assert estimate_speed(1.0, 0.25, 4) == pytest.approx(5 / 2)
    assert estimate_speed(0.5, 0.25, 8) == pytest.approx(1.5 / 1.25)
    assert estimate_speed(0.5, 0.25, 8, is_fixed=True) == pytest.approx((2 - 0.5**8) / 3)


def test_a_pass_costs_what_its_layers_and_the_head_weigh() -> None:
    costs = [estimate_cost(target().target, layers) for layers in range(1, LAYERS + 1)]
    steps = [b - a for a, b in pairwise(costs)]
    assert costs[-1] == 1.0
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert costs[0] > steps[0], "the head costs too"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_layer_is_the_cheapest_that_agrees(temperature: float) -> None:
    """Those below the fourth are right now and then, those above it cost more; and then nothing is looked at."""
    llm = drafting(target(), num_tokens=6)
    made = llm.drafter
    assert isinstance(made, EarlyExit)
    assert isinstance(made.layer_selector, MeasuredExitLayer)
    assert made.layer_selector.layer == 2
    assert made.spec.hidden_layers == (1, 2, 3, 4, 5, -1)
    sampling = Sampling(max_tokens=60, temperature=temperature, seed=5, ignore_eos=True)
    expected = target().generate(PROMPTS, sampling)
    done = llm.generate(PROMPTS, sampling)
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]
    assert made.layer_selector.layer == SETTLED
    assert made.spec.hidden_layers == ()
    shares = dict(zip(made.layer_selector.costs, made.layer_selector.agreement.rates, strict=True))
    assert shares[SETTLED] > 0.97 > shares[1]
    assert shares[SETTLED] == pytest.approx(shares[5])
    assert llm.engine.drafter.num_failures == 0


def test_the_choice_is_looked_at_again_and_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_selection, "MEASURE_INTERVAL_TOKENS", 40)
    llm = drafting(target(), num_tokens=6)
    made = llm.drafter
    assert isinstance(made, EarlyExit)
    assert isinstance(made.layer_selector, MeasuredExitLayer)
    llm.generate(PROMPTS, GREEDY)
    assert made.layer_selector.layer == SETTLED
    made.layer_selector.agreement.hits = [0.0] * 5  # as if another text had come
    made.layer_selector.agreement.num_observed = 1.0
    made.layer_selector.layer = 1
    looked = []
    for prompt in range(10, 20):
        llm.generate([[prompt]], GREEDY)
        looked.append(bool(made.spec.hidden_layers))
    assert any(looked)
    assert not all(looked)
    assert made.layer_selector.layer == SETTLED


def test_the_same_texts_choose_alike_whatever_is_drafted() -> None:
    """The agreement is that of the target's own passes, not of the drafts that were made."""

    def measure_agreement(num_tokens: int) -> list[float]:
        llm = drafting(target(), num_tokens=num_tokens)
        llm.generate([[33]], Sampling(max_tokens=64, temperature=0, ignore_eos=True))
        assert isinstance(llm.drafter, EarlyExit)
        assert isinstance(llm.drafter.layer_selector, MeasuredExitLayer)
        return llm.drafter.layer_selector.agreement.rates

    assert measure_agreement(2) == pytest.approx(measure_agreement(7))


def test_a_length_that_is_fixed_is_weighed_as_it_is() -> None:
    """A layer that is right half the time is worth two tokens of a draft and not eight."""
    for is_fixed, best in ((False, 1), (True, 4)):
        choice = MeasuredExitLayer({1: 0.1, 4: 0.5}, (8, 8), lambda states: states, 1)
        choice.agreement.hits, choice.agreement.num_observed = [50.0, 90.0], 100.0
        choice._had_full_budget = is_fixed
        choice._select_layer()
        assert choice.layer == best


def test_a_target_of_two_layers_has_nothing_to_choose() -> None:
    made = early_exit.create(early_exit.Config(), context(tiny_models.plain()))
    assert made.layer_selector == FixedExitLayer(1)


# ownership of the states


def test_it_drafts_for_one_engine() -> None:
    """Pages of one engine hold other sequences in the other."""
    llm = target()
    made = early_exit.create(early_exit.Config(exit_layer=2), context(llm))
    with pytest.raises(ForedraftError, match=r"made of.*make one for"):
        tiny_models.plain().with_drafter(made)
    llm.with_drafter(made)
    with pytest.raises(ForedraftError, match="make one for each engine"):  # whether it has drafted yet or not
        llm.with_drafter(made)


@pytest.mark.parametrize("layer", [0, LAYERS, LAYERS + 3])
def test_a_layer_that_is_not_there_is_refused_with_the_range(layer: int) -> None:
    with pytest.raises(ForedraftError, match=rf"exit_layer must lie in 1\.\.{LAYERS - 1}.*got {layer}"):
        target().with_drafter({"method": "early_exit", "exit_layer": layer})


def test_it_needs_a_target() -> None:
    with pytest.raises(ForedraftError, match="give Context a target"):
        early_exit.create(early_exit.Config(), DrafterContext(tiny_models.VOCAB))


def test_under_an_adaptive_length_the_text_is_the_same() -> None:
    llm = target().with_drafter("early_exit")
    assert llm.is_adaptive
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [
        c.token_ids for c in target().generate(PROMPTS, GREEDY)
    ]


def test_a_prefix_that_was_found_is_drafted_after() -> None:
    """A drafter without its own memory has none that could be missing."""
    limits = MemoryLimits(kv_tokens=4000, page_size=4)
    made = early_exit.create(early_exit.Config(exit_layer=SETTLED), context(target()))
    llm = tiny_models.limit_memory(target(), made, limits)
    once, again = (llm.generate([[50] * 21], GREEDY)[0] for _ in range(2))
    assert llm.engine.scheduler.prefix_hits >= 20
    assert again.token_ids == once.token_ids
    assert again.stats.num_accepted == again.stats.num_drafted > 0


# what its adapter learns


def test_an_adapter_begins_as_nothing_and_learns_what_the_layer_lacks() -> None:
    llm = tiny_models.plain()
    fresh = early_exit.create_trainee(early_exit.TrainConfig(loss="ce", exit_layer=1, rank=8), llm.target)
    states = make_trace(llm, (1,)).features[0]
    own = Truncated(llm.target.with_new_kv(), 1)
    ids = generate_texts(llm)[0][0, :-1].tolist()
    logits, _ = own.forward(
        ForwardBatch.build([Span(range(1, 9), 0, ids, range(len(ids)))], range(len(ids)), 16, "cpu")
    )
    assert torch.allclose(fresh.compute_logits(states), logits, atol=1e-4)
    learnt = EARLY_EXIT.get_checkpoint(llm)
    trained = early_exit.create_trainee(early_exit.TrainConfig(loss="ce"), llm.target, learnt)
    seen = make_trace(llm, (1,))
    assert trained.compute_loss(seen).total < 0.5 * fresh.compute_loss(seen).total


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_only_the_adapter_learns(loss: str) -> None:
    llm = tiny_models.plain()
    trainee = early_exit.create_trainee(early_exit.TrainConfig(loss=loss, exit_layer=1, rank=8), llm.target)
    trainee.compute_loss(make_trace(llm, (1,))).total.backward()
    assert trainee.network.down_proj.weight.grad is not None
    assert trainee.network.down_proj.weight.grad.abs().max() > 0
    assert all(weight.grad is None for weight in llm.target.model.parameters())


def test_positions_that_are_not_to_learn_are_not_asked() -> None:
    llm = tiny_models.plain()
    seen = make_trace(llm, (1,))
    trainee = early_exit.create_trainee(early_exit.TrainConfig(loss="ce", exit_layer=1, rank=8), llm.target)
    mask = torch.zeros_like(seen.mask)
    mask[2, 5] = True
    alone = trainee.compute_loss(replace(seen, mask=mask)).total.item()
    logits = trainee.compute_logits(seen.features[2, 4][None]).detach()
    assert alone == pytest.approx(-float(logits.log_softmax(-1)[0, seen.tokens[2, 5]]), rel=1e-5)


def test_an_adapter_is_trained_recognised_and_drafted_with(tmp_path: Path) -> None:
    """The figures of its replay are those of a real run."""
    settling(4, 3).float().save_pretrained(tmp_path / "model")
    write_ids(tmp_path)
    asked = {"evaluation": EvaluationConfig(prompts=4, tokens=24), "held_out_share": 0.2}
    settings = {"exit_layer": "2", "rank": "16"}
    outcome = train(replace(training_plan(tmp_path, settings=settings, steps=30, **asked), method="early_exit"))
    assert recognise(outcome.folder)[0] == "early_exit"
    llm = LLM(str(tmp_path / "model"), {"method": "early_exit", "model": str(outcome.folder)}, num_speculative_tokens=5)
    assert isinstance(llm.drafter, EarlyExit)
    assert llm.drafter.layer_selector == FixedExitLayer(2)
    documents = DocumentReader(None, 97, frozenset({3})).read_documents([str(tmp_path / "ids.npy")])
    prompts = select_prompts(hold_out(documents, 0.2)[1], 4, 64)
    samplings = [Sampling(max_tokens=24, temperature=1.0, seed=i) for i in range(len(prompts))]
    stats = [c.stats for c in llm.generate(prompts, samplings)]
    real = sum(s.num_tokens for s in stats) / sum(s.target_passes for s in stats)
    assert outcome.eval_metrics["sampled"]["length"] == pytest.approx(real, abs=1e-4)
    with pytest.raises(ForedraftError, match="adapter for layer 2, not 1"):
        llm.with_drafter({"method": "early_exit", "model": str(outcome.folder), "exit_layer": 1})


@pytest.mark.parametrize(
    ("config", "why"), [({"exit_layer": LAYERS}, "must lie in 1..7"), ({"rank": 0}, "rank must be positive")], ids=str
)
def test_adapters_that_cannot_be_are_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ForedraftError, match=why):
        early_exit.create_trainee(early_exit.TrainConfig(**config), target().target)


SHAPE = EarlyExitShape(hidden=32, rank=8, exit_layer=2)
FACTS = TargetInfo("the-target", hidden=32, vocab_size=97, num_layers=8)


def save_adapter(folder: Path, **config: Any) -> Path:
    torch.manual_seed(0)
    sizes = {"norm": (32,), "gate_proj": (8, 32), "up_proj": (8, 32), "down_proj": (32, 8)}
    tensors = {f"{name}.weight": torch.randn(size) for name, size in sizes.items()}
    write(folder, "early_exit", SHAPE, tensors)
    if config:
        file = folder / "config.json"
        fields = json.loads(file.read_text()) | config
        file.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    return folder


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", target_num_layers=8)
    found = read(folder, FACTS)
    assert (found.method, found.shape) == ("early_exit", SHAPE)
    torch.manual_seed(0)
    assert torch.equal(found.tensors["norm.weight"], torch.randn(32))


@pytest.mark.parametrize(
    ("config", "facts", "why"),
    [
        ({}, {"hidden": 64}, "hidden size 32, and the-target has 64"),
        ({"target_num_layers": 12}, {}, "number of layers 12, and the-target has 8"),
        ({"exit_layer": None}, {}, "must set exit_layer, .* and has None"),
        ({"exit_layer": True}, {}, "has True"),
        ({"exit_layer": 8}, {}, r"left after 1\.\.7 layers"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_target_is_refused(
    tmp_path: Path, config: dict[str, Any], facts: dict[str, int], why: str
) -> None:
    folder = save_adapter(tmp_path / "adapter", **({"target_num_layers": 8} | config))
    with pytest.raises(ForedraftError, match=why):
        read(folder, replace(FACTS, **facts))


def test_a_plan_is_refused_before_anything_is_made() -> None:
    with pytest.raises(ForedraftError, match="branching fixes the whole tree"):
        early_exit.create(early_exit.Config(branching=(2,), top_k=2), context(target()))
