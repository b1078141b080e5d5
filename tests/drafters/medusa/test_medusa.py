"""Medusa: the state for each token, the layout of the heads, its trees, its distributions, and its training targets."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft import LLM, Sampling
from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.checkpoints.write import save
from foredraft.drafters.checkpoint_folders import read
from foredraft.drafters.common.head_losses import gather_targets, select_roots
from foredraft.drafters.common.last_hidden_state import LastHiddenStates, LinearFactory
from foredraft.drafters.common.static_tree import NUM_RANKS
from foredraft.drafters.common.target_access import describe_target
from foredraft.drafters.losses import TargetLogProbs, Trace
from foredraft.drafters.medusa import method as medusa
from foredraft.drafters.medusa.checkpoint import MedusaShape
from foredraft.drafters.medusa.network import MedusaHeadRunner, MedusaHeads, make_output_function
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.linear import DTYPE_KINDS
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.request import Batch
from foredraft.tree import Commit
from tests.support import successor_model, tiny_heads, tiny_models
from tests.support.requests import make_request
from tests.support.statistical_checks import chi_square
from tests.support.tiny_heads import MEDUSA

V = successor_model.V
GREEDY = Sampling(max_tokens=40, temperature=0)


def seer(shift: int = 0, num_heads: int = 4) -> Checkpoint:
    """Make heads for the successor target: head h gives the token h + 2 positions after its state if `shift` is 0."""
    tensors: dict[str, Tensor] = {}
    for h in range(num_heads):
        tensors[f"{h}.0.linear.weight"] = torch.zeros(V, V, dtype=torch.float64)
        tensors[f"{h}.0.linear.bias"] = torch.zeros(V, dtype=torch.float64)
        tensors[f"{h}.1.weight"] = successor_model.power(h + 2 + shift)
    return Checkpoint("medusa", "made", "made", MedusaShape(V, V, num_heads), tensors)


def drafting(checkpoint: Checkpoint, dtype: torch.dtype = torch.float64, verify: str = "match", **options: Any) -> LLM:
    made = medusa.from_checkpoint(medusa.Config(**options), checkpoint, successor_model.context(4, dtype))
    return successor_model.llm(dtype).with_drafter(made, verify=verify)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"tree_nodes": 12}, {"min_confidence": 0.5}], ids=str)
def test_heads_that_know_the_target_are_never_wrong(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """If the state, its position or the head of a depth is off by one, no token is accepted."""
    llm = drafting(seer(), dtype, **options)
    for done in llm.generate([[3], [5, 12], [9] * 20], replace(GREEDY, max_tokens=41)):
        # the prompt's step drafts nothing and gives one token, every other one gives the depth of the tree and one
        depth = llm.drafter.tree.depth
        assert done.stats.target_passes == 1 + -(-40 // (depth + 1))
        assert len(set(done.stats.accepted_at)) == 1
        assert depth >= 3
    assert llm.engine.drafter.num_failures == 0


@pytest.mark.parametrize("shift", [-1, 1])
def test_heads_one_position_off_are_never_right(shift: int) -> None:
    """The test above has teeth."""
    done = drafting(seer(shift)).generate([[3], [5, 12]], GREEDY)
    assert sum(c.stats.num_accepted for c in done) == 0
    assert sum(c.stats.num_drafted for c in done) > 0


@pytest.mark.parametrize("verify", ["match", "reject", "block"])
def test_sampled_drafts_of_heads_that_know_the_target_are_mostly_right(verify: str) -> None:
    llm = drafting(seer(), verify=verify)
    done = llm.generate([[3], [5, 12], [9] * 20], Sampling(max_tokens=60, temperature=1, seed=4))
    accepted, drafted = (sum(getattr(c.stats, name) for c in done) for name in ("num_accepted", "num_drafted"))
    assert accepted > 0.6 * drafted  # the likeliest token has a probability of 0.95
    assert llm.engine.drafter.num_failures == 0


def test_a_prompt_and_a_missed_step_draft_nothing() -> None:
    """A state of another position predicts another token."""
    states = LastHiddenStates()
    request = make_request(2, [1, 2, 3, 4], GREEDY)
    assert states.get(request) is None
    features = torch.arange(8.0).view(1, 4, 2)
    states.observe(Batch((request,), (4,), (0,)), Commit.from_lists([[0, 1, 2, 3]], [[2, 3, 4, 9]], features=features))
    assert states.get(request) is None  # the token after the prompt is not committed yet
    request.output, request.num_computed = [9], 4
    assert torch.equal(states.get(request), torch.tensor([6.0, 7.0]))
    request.output = [9, 8]  # someone else's step went by
    assert states.get(request) is None
    request.output = [9]
    states.observe(
        Batch((request,), (1,), (0,)), Commit.from_lists([[]], [[]], features=features, failed=frozenset([0]))
    )
    assert states.get(request) is None


def test_forgotten_slots_hold_nothing() -> None:
    drafter = MEDUSA.make_drafter(4)
    llm = tiny_models.plain().with_drafter(drafter)
    llm.generate([[5, 6], [7], [8]], replace(GREEDY, max_tokens=6))
    assert not drafter._states._states


def random_heads(shape: MedusaShape, is_shared: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(1)
    network = MedusaHeads(shape).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tensors = dict(network.state_dict())
    if is_shared:
        first = tensors[f"0.{shape.num_layers}.weight"]
        tensors |= {name: first for name in tensors if name.endswith(f".{shape.num_layers}.weight")}
    return tensors


def formula(tensors: dict[str, Tensor], shape: MedusaShape, hidden: Tensor, head: int, lm_head: Tensor) -> Tensor:
    x = hidden
    for layer in range(shape.num_layers):
        w, b = tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"]
        y = x @ w.T + b
        x = x + y / (1 + torch.exp(-y))
    return x @ (tensors[f"{head}.{shape.num_layers}.weight"] if shape.has_own_head else lm_head).T


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("kind", ["own", "shared", "target's"])
def test_the_layout_for_drafting_has_the_numbers_of_the_formula(kind: str, num_layers: int, dtype: torch.dtype) -> None:
    """All heads' first matrices are one product, shared ones too; a slice of the wrong head is a plausible draft."""
    if dtype in DTYPE_KINDS and load_library() is None:
        pytest.skip("the native kernels are not installed")
    target = successor_model.llm(dtype).target
    shape = MedusaShape(V, V, 3, num_layers, has_own_head=kind != "target's")
    tensors = random_heads(shape, kind == "shared")
    hidden = torch.randn(5, V, dtype=torch.float64).to(dtype)
    products = LinearFactory(successor_model.context(3, dtype))
    assert products.is_native == (dtype in DTYPE_KINDS)
    x = MedusaHeadRunner(shape, tensors, 3, products)(hidden)
    logits = make_output_function(shape, tensors, 3, products, target, V)(x[:, :2], 2)
    assert logits.shape == (5, 2, V)
    lm_head = target.model.get_output_embeddings().weight.double()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for head in range(2):
        wanted = formula(tensors, shape, hidden.double(), head, lm_head)
        assert (logits[:, head].double() - wanted).norm() <= tolerance * wanted.norm()


def test_the_network_under_training_has_the_numbers_of_the_formula() -> None:
    for has_own_head in (True, False):
        shape = MedusaShape(V, V, 2, 2, has_own_head)
        network = MedusaHeads(shape).double()
        tensors = random_heads(shape)
        network.load_state_dict(tensors)
        hidden = torch.randn(4, V, dtype=torch.float64)
        found = network(hidden, 1)
        wanted = formula(tensors, shape, hidden, 1, torch.eye(V, dtype=torch.float64))
        assert torch.allclose(found, wanted, atol=1e-12)


def test_a_head_of_fewer_tokens_than_the_target_drafts_only_those() -> None:
    """Its distribution has the target's width, with zeros for tokens that the head lacks."""
    checkpoint = seer()
    tensors = {k: v[: V - 8] if k.endswith(".1.weight") else v for k, v in checkpoint.tensors.items()}
    small = replace(checkpoint, tensors=tensors, shape=replace(checkpoint.shape, vocab_size=V - 8))  # type: ignore[type-var]
    for sampling in (GREEDY, Sampling(max_tokens=40, seed=2), Sampling(max_tokens=40, presence_penalty=0.1, seed=2)):
        for verify in ("match", "reject"):
            llm = drafting(small, verify=verify, tree_nodes=6)
            done = llm.generate([[3], [5, 12]], sampling)
            assert sum(c.stats.num_accepted for c in done) > 0
            assert llm.engine.drafter.num_failures == 0


def markov() -> tuple[LLM, np.ndarray]:
    """Make a successor target with random successors, and its distribution [x, y] of y after x."""
    made = successor_model.model()
    other = type(made)(made.config).double().eval()
    other.load_state_dict(made.state_dict())
    generator = torch.Generator().manual_seed(3)
    logits = 1.6 * torch.randn(V, V, generator=generator, dtype=torch.float64)
    logits[8:] -= 4  # a few tokens carry most, so that cells fill
    other.lm_head.weight.data.copy_(logits / V**0.5)
    llm = LLM(other, None)
    state = F.normalize(torch.eye(V, dtype=torch.float64)) * (V / (1 + 1e-6 * V)) ** 0.5
    return llm, (state @ other.lm_head.weight.T).softmax(-1).detach().numpy()


@pytest.mark.parametrize(
    ("verify", "options", "penalty"),
    [("reject", {"tree_nodes": 7}, 0.0), ("reject", {"tree_nodes": 7}, 1e-9), ("reject", {}, 1e-9), ("block", {}, 0.0)],
)
def test_drawn_trees_leave_the_distribution_of_the_target(verify: str, options: dict[str, Any], penalty: float) -> None:
    """Siblings sampled with one uniform, or from another distribution than q, shift the distribution of texts.
    The smallest penalty takes the way that goes level by level."""
    llm, probs = markov()
    checkpoint = seer()
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(".1.weight"):
            noise = torch.randn(V, V, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
            noise[8:] -= 3
            tensor.copy_(0.25 * noise)
    context = DrafterContext(vocab_size=V, target=llm.target, num_speculative_tokens=3, dtype=torch.float64)
    drafter = medusa.from_checkpoint(medusa.Config(**options), checkpoint, context)
    llm = llm.with_drafter(drafter, verify=verify)
    done = llm.generate([[2]] * 3000, Sampling(max_tokens=4, presence_penalty=penalty))
    after = Counter((c.token_ids[1], c.token_ids[2]) for c in done)
    wanted = (probs[2] @ probs)[:, None] * probs
    counts = np.zeros((V, V))
    for (x, y), count in after.items():
        counts[x, y] = count
    assert chi_square(counts, wanted) > 1e-6
    accepted, drafted = (sum(getattr(c.stats, name) for c in done) for name in ("num_accepted", "num_drafted"))
    assert 300 < accepted < drafted - 300
    assert llm.engine.drafter.num_failures == 0


@pytest.mark.parametrize("verify", ["match", "reject"])
def test_level_by_level_and_at_once_are_the_same_drafts(verify: str) -> None:
    """The way for penalties is the slow reference of the other: a penalty too small to matter changes no text."""
    for temperature in (0.0, 0.8):
        texts = []
        for penalty in (0.0, 1e-12):
            llm = tiny_models.plain().with_drafter(MEDUSA.make_drafter(4, tree_nodes=9), verify=verify)
            sampling = Sampling(max_tokens=24, temperature=temperature, presence_penalty=penalty, ignore_eos=True)
            done = llm.generate([[33], [44, 45], [9]], replace(sampling, seed=3))
            texts.append([(c.token_ids, c.stats.num_accepted, c.stats.num_drafted) for c in done])
        if verify == "match" or temperature == 0:
            assert texts[0] == texts[1]
        else:  # nodes have equal numbers, so even the sampled tokens agree
            assert [t[0] for t in texts[0]] == [t[0] for t in texts[1]]


def test_confidence_cuts_by_distributions_alone() -> None:
    """Under `reject`, a length that depended on the sampled tokens would carry information about them."""
    llm = tiny_models.plain().with_drafter(MEDUSA.make_drafter(4, min_confidence=0.2), verify="reject")
    full = tiny_models.plain().with_drafter(MEDUSA.make_drafter(4), verify="reject")
    sampling = Sampling(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
    few, many = (sum(c.stats.num_drafted for c in x.generate([[33], [9], [50]], sampling)) for x in (llm, full))
    assert 0 < few < many


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tree": ((0,), (0, 0)), "tree_nodes": 2}, "without tree_nodes"),
        ({"tree_nodes": 0}, "tree_nodes must be positive"),
        ({"tree_nodes": 10**9}, "at most 2048"),
        ({"min_confidence": 1.0}, "min_confidence"),
        ({"tree": ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0))}, "deeper than there are heads"),
        ({"tree": tuple((i,) for i in range(NUM_RANKS + 1))}, "ranks lie in 0..9"),
        ({"quantization": "int3"}, "unknown quantization"),
    ],
)
def test_options_that_make_no_draft_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ForedraftError, match=why):
        medusa.from_checkpoint(medusa.Config(**options), seer(), successor_model.context(4))


def test_more_tokens_than_heads_are_as_many_as_heads() -> None:
    drafter = medusa.from_checkpoint(medusa.Config(), seer(num_heads=2), successor_model.context(8))
    assert drafter.spec.max_nodes == 2


def some_trace(length: int = 9) -> Trace:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, V, (3, length + 1), generator=generator)
    mask = torch.rand(3, length + 1, generator=generator) < 0.8
    logits = torch.randn(3, length, V, generator=generator, dtype=torch.float64)
    return Trace(tokens, torch.randn(3, length, V, generator=generator), TargetLogProbs.from_logits(logits), mask)


@pytest.mark.parametrize("depth", [1, 2, 4, 9, 10])
def test_training_asks_each_state_for_the_token_its_draft_would_hold(depth: int) -> None:
    """Position by position, from the definition: state i, root i + 1, the token `depth` below it is i + 1 + depth."""
    trace = some_trace()
    wanted = [
        (b, i) for b in range(3) for i in range(9)
        if i + 1 + depth <= 9 and all(trace.mask[b, j] for j in range(i + 1, i + 2 + depth))
    ]  # fmt: skip
    rows = select_roots(trace, depth)
    assert list(zip(*(x.tolist() for x in rows), strict=True)) == wanted
    log_probs, tokens = gather_targets(trace, rows, depth)
    for row, (b, i) in enumerate(wanted):
        assert tokens[row] == trace.tokens[b, i + 1 + depth]
        assert torch.equal(log_probs.logprobs[row], trace.target_log_probs.logprobs[b, i + depth])


@pytest.mark.parametrize("loss", ["ce", "kl", "lk"])
def test_heads_that_know_the_target_have_no_loss_to_speak_of(loss: str) -> None:
    """The same alignment from the other side: on the successor target's own text, exact heads are all but perfect and
    shifted ones hopeless."""
    target = successor_model.llm().target
    start = torch.arange(6)
    tokens = (start[:, None] + successor_model.STRIDE * torch.arange(13)) % V
    states = F.one_hot(tokens[:, :-1], V).double() * V**0.5
    logits = 3 * states @ successor_model.power(1).T
    trace = Trace(tokens, states.float(), TargetLogProbs.from_logits(logits), torch.ones_like(tokens, dtype=torch.bool))
    found = []
    for shift in (0, 1):
        trainee = medusa.create_trainee(medusa.TrainConfig(loss=loss), target, seer(shift))
        for name, parameter in trainee.network.named_parameters():
            parameter.data *= 3 if name.endswith(".1.weight") else 1
        found.append(trainee.compute_loss(trace))
        trainee.finish([trace])
        assert [row[0] for row in trainee.accuracies] == [1.0 - shift] * 4
    assert found[0].total < 1e-3
    assert found[1].total > 0.9
    assert set(found[0].components) == {"loss_1", "loss_2", "loss_3", "loss_4"}


def test_new_heads_begin_as_the_targets_own_and_learn_alone() -> None:
    target = tiny_models.plain().target
    trainee = medusa.create_trainee(medusa.TrainConfig(heads=2), target)
    hidden = torch.randn(3, target.hidden_size)
    wanted = hidden.double() @ target.model.lm_head.weight.T
    assert torch.allclose(trainee.compute_logits(1, hidden).double(), wanted, atol=1e-4)
    before = target.model.lm_head.weight.clone()
    optimizer = torch.optim.SGD(trainee.network.parameters(), 0.1)
    first = trainee.compute_loss(tiny_heads.make_trace(tiny_models.plain(), (AFTER_FINAL_NORM,)))
    first.total.backward()
    optimizer.step()
    assert trainee.compute_loss(tiny_heads.make_trace(tiny_models.plain(), (AFTER_FINAL_NORM,))).total < first.total
    assert torch.equal(before, target.model.lm_head.weight)
    assert target.model.lm_head.weight.grad is None


def test_large_logits_are_made_twice_and_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    for kept in (1 << 26, 1):
        monkeypatch.setattr("foredraft.drafters.common.head_losses.MAX_STORED_LOGITS", kept)
        trainee = medusa.create_trainee(medusa.TrainConfig(heads=2), tiny_models.plain().target)
        trainee.compute_loss(tiny_heads.make_trace(tiny_models.plain(), (AFTER_FINAL_NORM,))).total.backward()
        gradients.append([p.grad for p in trainee.network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("own_head", [True, False])
def test_trained_heads_are_read_back_with_their_accuracies(own_head: bool, tmp_path: Any) -> None:
    target = tiny_models.plain().target
    trainee = medusa.create_trainee(medusa.TrainConfig(heads=3, own_head=own_head), target)
    trainee.finish([tiny_heads.make_trace(tiny_models.plain(), (AFTER_FINAL_NORM,))])
    layout = trainee.to_checkpoint()
    tensors, config = layout.tensors, layout.config
    assert config["medusa_num_heads"] == 3
    save(tmp_path, CheckpointLayout("medusa", tensors, config))
    llm = tiny_models.plain().with_drafter({"method": "medusa", "model": str(tmp_path), "tree_nodes": 5})
    assert llm.engine.drafter.spec.max_nodes == 5
    loaded = read(str(tmp_path), describe_target(target), "medusa")
    assert loaded.shape.num_heads == 3
    assert loaded.shape.has_own_head == own_head
    for row, measured in zip(loaded.shape.accuracies, trainee.accuracies, strict=True):
        assert row == pytest.approx(measured, abs=1e-4)
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"heads": 0}, "heads and layers"),
        ({"backbone": 0.1, "own_head": False}, "own_head"),
        ({"decay": 0.0}, "decay"),
        ({"loss": "mse"}, "unknown loss"),
    ],
)
def test_training_options_that_make_no_sense_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ForedraftError, match=why):
        medusa.create_trainee(medusa.TrainConfig(**options), tiny_models.plain().target)
