"""Blockwise heads: which state predicts which token, the formula, and which heads the training losses use."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import LLM, Sampling
from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.checkpoints.write import save
from foredraft.drafters.blockwise import method as blockwise
from foredraft.drafters.blockwise.checkpoint import BlockwiseShape
from foredraft.drafters.blockwise.network import BlockwiseHeads, BlockwiseStepRunner
from foredraft.drafters.checkpoint_folders import read
from foredraft.drafters.common.head_losses import gather_targets, select_roots
from foredraft.drafters.common.last_hidden_state import LinearFactory
from foredraft.drafters.common.target_access import describe_target
from foredraft.drafters.losses import LOSS_NAMES, compute_draft_loss
from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.linear import DTYPE_KINDS
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from tests.support import successor_model, tiny_heads, tiny_models

V = successor_model.V
GREEDY = Sampling(max_tokens=41, temperature=0)


def seer(shift: int = 0, heads: int = 4) -> Checkpoint:
    """Make exact heads for the successor target: head h maps a state to that of the token h + 1 positions later. The
    target's own matrix gives the token after it. A state is positive, so that the hidden layer passes it on."""
    jumps = [successor_model.power(h + 1 + shift) - torch.eye(V, dtype=torch.float64) for h in range(heads)]
    tensors = {
        "hidden.weight": torch.eye(V, dtype=torch.float64),
        "hidden.bias": torch.zeros(V, dtype=torch.float64),
        "output.weight": torch.cat(jumps),
        "output.bias": torch.zeros(heads * V, dtype=torch.float64),
    }
    return Checkpoint("blockwise", "made", "made", BlockwiseShape(V, V, heads, V), tensors)


def drafting(checkpoint: Checkpoint, dtype: torch.dtype = torch.float64, verify: str = "match", **options: Any) -> LLM:
    made = blockwise.from_checkpoint(blockwise.Config(**options), checkpoint, successor_model.context(4, dtype))
    return successor_model.llm(dtype).with_drafter(made, verify=verify)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"min_confidence": 0.3}], ids=str)
def test_heads_that_know_the_target_are_never_wrong(options: dict[str, Any], dtype: torch.dtype) -> None:
    """If the state or the head is off by one, no token is accepted."""
    llm = drafting(seer(), dtype, **options)
    for done in llm.generate([[3], [5, 12], [9] * 20], GREEDY):
        assert done.stats.target_passes == 1 + 8  # one token from the prompt's step, five from each that drafts
        assert done.stats.accepted_at == (8, 8, 8, 8)
    assert llm.engine.drafter.num_failures == 0


@pytest.mark.parametrize("shift", [-1, 1])
def test_heads_one_position_off_are_never_right(shift: int) -> None:
    """The test above has teeth."""
    done = drafting(seer(shift)).generate([[3], [5, 12]], GREEDY)
    assert sum(c.stats.num_accepted for c in done) == 0
    assert sum(c.stats.num_drafted for c in done) > 0


@pytest.mark.parametrize("verify", ["match", "reject", "block"])
def test_sampled_blocks_of_heads_that_know_are_mostly_right(verify: str) -> None:
    llm = drafting(seer(), verify=verify)
    done = llm.generate([[3], [5, 12], [9] * 20], Sampling(max_tokens=60, temperature=1, seed=4))
    assert sum(c.stats.acceptance_length for c in done) > 3 * 3  # the likeliest token has a probability of 0.95
    assert llm.engine.drafter.num_failures == 0


def test_unsure_heads_propose_nothing() -> None:
    blind = seer()
    blind.tensors["output.weight"][:] = -torch.eye(V).repeat(4, 1)  # every state becomes zero, every row uniform
    done = drafting(blind, min_confidence=0.3).generate([[3]], GREEDY)
    assert done[0].stats.num_drafted <= done[0].stats.target_passes  # at most one node a pass
    assert drafting(blind).generate([[3]], GREEDY)[0].stats.num_drafted > 3 * done[0].stats.num_drafted


def test_a_block_is_no_longer_than_there_are_heads() -> None:
    assert blockwise.from_checkpoint(blockwise.Config(), seer(heads=2), successor_model.context(8)).spec.max_nodes == 2
    assert blockwise.from_checkpoint(blockwise.Config(), seer(), successor_model.context(3)).spec.max_nodes == 3


def random_heads(shape: BlockwiseShape) -> dict[str, Tensor]:
    torch.manual_seed(5)
    network = BlockwiseHeads(shape).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return dict(network.state_dict())


def formula(tensors: dict[str, Tensor], hidden: Tensor, head: int, lm_head: Tensor) -> Tensor:
    """Written out from the paper, row by row."""
    width, out = hidden.shape[-1], []
    for h in hidden:
        inner = tensors["hidden.weight"] @ h + tensors["hidden.bias"]
        inner = torch.where(inner > 0, inner, torch.zeros_like(inner))
        block = tensors["output.weight"].unflatten(0, (-1, width))[head] @ inner
        out.append(lm_head @ (h + block + tensors["output.bias"].unflatten(0, (-1, width))[head]))
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("depth", [1, 3])
def test_the_layout_for_drafting_has_the_numbers_of_the_formula(depth: int, dtype: torch.dtype) -> None:
    if dtype in DTYPE_KINDS and load_library() is None:
        pytest.skip("the native kernels are not installed")
    shape, target = BlockwiseShape(V, V, 3, 20), successor_model.llm(dtype).target
    tensors = random_heads(shape)
    hidden = torch.randn(5, V, dtype=torch.float64).to(dtype)
    products = LinearFactory(successor_model.context(3, dtype))
    assert products.is_native == (dtype in DTYPE_KINDS)
    steps = BlockwiseStepRunner(shape, tensors, depth, products, target)
    states = steps.begin(hidden)
    native = steps.make_native()
    assert (native is None) == (dtype == torch.float64)
    native_states = hidden if native is None else native.begin(hidden)
    lm_head = target.model.get_output_embeddings().weight.double()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for head in range(depth):
        states, logits = steps(head, states, [1, 2, 3, 4, 5])
        wanted = formula(tensors, hidden.double(), head, lm_head)
        assert (logits.double() - wanted).norm() <= tolerance * wanted.norm()
        if native is not None:
            native_states, logits = native(head, native_states, [1, 2, 3, 4, 5])
            assert (logits.double() - wanted).norm() <= tolerance * wanted.norm()


def test_the_network_under_training_has_the_numbers_of_the_formula() -> None:
    shape = BlockwiseShape(V, V, 3, 20)
    network = BlockwiseHeads(shape).double()
    network.load_state_dict(random_heads(shape))
    hidden = torch.randn(4, V, dtype=torch.float64)
    for head in range(3):
        wanted = formula(random_heads(shape), hidden, head, torch.eye(V, dtype=torch.float64))
        assert torch.allclose(network(hidden, head), wanted, atol=1e-12)


def make_trainee(**options: Any) -> Any:
    return blockwise.create_trainee(blockwise.TrainConfig(**options), tiny_models.plain().target)


def test_new_heads_say_what_the_target_says() -> None:
    target = tiny_models.plain().target
    states = torch.randn(5, 32)
    for head in range(2):
        wanted = target.compute_logits(states.double())
        assert torch.allclose(make_trainee(heads=2, inner=8).compute_logits(head, states), wanted, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_training_asks_every_head_for_its_own_token(loss: str) -> None:
    trace = tiny_heads.make_trace(tiny_models.plain(), (AFTER_FINAL_NORM,))
    shown = torch.rand(trace.mask.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    trace = replace(trace, mask=trace.mask & shown)
    trainee = make_trainee(loss=loss, heads=3, inner=8, decay=0.5)
    torch.nn.init.normal_(trainee.network.output.weight, std=0.3)
    found, wanted = trainee.compute_loss(trace), []
    for head in range(3):
        rows = select_roots(trace, head + 1)
        losses = []
        for text, position in zip(*(x.tolist() for x in rows), strict=True):
            log_probs, token = (
                trace.target_log_probs.select((text, position + head + 1)),
                trace.tokens[text, position + head + 2],
            )
            logits = trainee.compute_logits(head, trace.features[text, position][None])
            log_probs = replace(log_probs, logprobs=log_probs.logprobs[None])
            losses.append(compute_draft_loss(loss, logits, log_probs, token[None]).mean())
        assert torch.equal(gather_targets(trace, rows, head + 1)[1], trace.tokens[rows[0], rows[1] + head + 2])
        wanted.append(float(torch.stack(losses).mean()))
        assert found.components[f"loss_{head + 1}"] == pytest.approx(wanted[-1], rel=1e-4)
    assert float(found.total) == pytest.approx((wanted[0] + 0.5 * wanted[1] + 0.25 * wanted[2]) / 1.75, rel=1e-4)


def test_a_loss_of_one_head_a_step_is_that_of_all_on_average_and_of_all_when_measured() -> None:
    """The paper samples one of the sub-losses for every step. With a decay, the weight is the probability of a loss."""
    trace = tiny_heads.make_trace(tiny_models.plain(), (AFTER_FINAL_NORM,))
    whole, one = (make_trainee(heads=3, inner=8, decay=0.5, heads_per_step=each) for each in ("all", "one"))
    for trainee in (whole, one):
        torch.manual_seed(3)
        torch.nn.init.normal_(trainee.network.output.weight, std=0.3)
        torch.nn.init.normal_(trainee.network.hidden.weight, std=0.3)
        torch.nn.init.zeros_(trainee.network.hidden.bias)
    all_of = whole.compute_loss(trace)
    each = sorted(all_of.components.values())
    torch.manual_seed(0)
    drawn = [float(one.compute_loss(trace).total.detach()) for _ in range(60)]
    assert len({min(range(3), key=lambda i: abs(each[i] - x)) for x in drawn}) == 3
    assert all(min(abs(x - y) for y in each) < 1e-4 for x in drawn)
    spread = (max(each) - min(each)) / 60**0.5
    assert abs(sum(drawn) / 60 - float(all_of.total.detach())) < 3 * spread
    one.network.eval()
    assert float(one.compute_loss(trace).total.detach()) == pytest.approx(float(all_of.total.detach()), rel=1e-6)


def test_trained_heads_are_read_back(tmp_path: Any) -> None:
    target, trainee = tiny_models.plain().target, make_trainee(heads=3, inner=8)
    layout = trainee.to_checkpoint()
    tensors, config = layout.tensors, layout.config
    assert {name.partition(".")[0] for name in tensors} == {"blockwise"}
    save(tmp_path, CheckpointLayout("blockwise", tensors, config))
    loaded = read(str(tmp_path), describe_target(target), "blockwise")
    assert loaded.shape == trainee.network.shape == BlockwiseShape(32, tiny_models.VOCAB, 3, 24)
    assert all(torch.equal(loaded.tensors[name.removeprefix("blockwise.")], t) for name, t in tensors.items())
    again = blockwise.create_trainee(blockwise.TrainConfig(), target, loaded)
    assert torch.equal(again.network.hidden.weight, trainee.network.hidden.weight)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"heads": 0}, "heads and inner must be positive"),
        ({"inner": 0}, "heads and inner must be positive"),
        ({"decay": 1.5}, "decay"),
        ({"loss": "mse"}, "unknown loss"),
        ({"heads_per_step": "some"}, "heads_per_step must be all or one"),
    ],
)
def test_training_options_that_make_no_sense_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ForedraftError, match=why):
        make_trainee(**options)


def test_other_heads_are_not_taken_for_these() -> None:
    other = tiny_heads.MEDUSA.get_checkpoint(tiny_models.plain())
    with pytest.raises(ForedraftError, match="no blockwise heads but fitted"):
        blockwise.from_checkpoint(blockwise.Config(), other, successor_model.context(4))
    with pytest.raises(ForedraftError, match="cannot be trained on"):
        blockwise.create_trainee(blockwise.TrainConfig(), tiny_models.plain().target, other)
