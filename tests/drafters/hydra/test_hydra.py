"""Hydra heads: inputs and output of each head, the formula, trees, the state of the target, and the training losses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import LLM, Sampling
from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.checkpoints.write import save
from foredraft.drafters.checkpoint_folders import read, write
from foredraft.drafters.common.last_hidden_state import LinearFactory
from foredraft.drafters.common.target_access import describe_target
from foredraft.drafters.creation import create_drafter
from foredraft.drafters.hydra import method as hydra
from foredraft.drafters.hydra import network as hydra_network
from foredraft.drafters.hydra.checkpoint import HydraPrefixShape, HydraShape
from foredraft.drafters.hydra.network import HydraHeads, HydraStepRunner
from foredraft.drafters.losses import LOSS_NAMES, compute_draft_loss
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.linear import DTYPE_KINDS
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from tests.support import successor_model, tiny_heads, tiny_models

V = successor_model.V
GREEDY = Sampling(max_tokens=41, temperature=0)


def seer(kind: str, shift: int = 0, heads: int = 4, is_lean: bool = False) -> Checkpoint:
    """Make exact heads for the successor target from one part of their input: the state, the first token after it, or
    the last. They ignore the others. A lean head has no output matrices; its output is the state of the next token."""
    tensors: dict[str, Tensor] = {}
    for head in range(heads):
        part = {"state": 0, "first": 1, "last": head + 1}[kind]
        ahead = head + 2 - part + shift  # positions from the token of that part to the predicted one
        width, size = (head + 2) * V, 1.0 if kind == "state" else V**0.5  # embeddings are shorter than states
        kept = torch.zeros(V, width, dtype=torch.float64)
        kept[:, part * V : (part + 1) * V] = size * (successor_model.power(ahead - 1) if is_lean else torch.eye(V))
        tensors[f"hydra_mlp.{head}.0.res_connection.weight"] = kept
        tensors[f"hydra_mlp.{head}.0.linear.weight"] = torch.zeros(V, width, dtype=torch.float64)
        for name in ("res_connection", "linear"):
            tensors[f"hydra_mlp.{head}.0.{name}.bias"] = torch.zeros(V, dtype=torch.float64)
        if not is_lean:
            tensors[f"hydra_lm_head.{head}.weight"] = successor_model.power(ahead)
            tensors[f"hydra_lm_head.{head}.bias"] = torch.zeros(V, dtype=torch.float64)
    return Checkpoint("hydra", "made", "made", HydraShape(V, V, heads, has_own_head=not is_lean), tensors)


def drafting(
    checkpoint: Checkpoint,
    num_tokens: int = 4,
    dtype: torch.dtype = torch.float64,
    verify: str = "match",
    **options: Any,
) -> LLM:
    made = hydra.from_checkpoint(hydra.Config(**options), checkpoint, successor_model.context(num_tokens, dtype))
    return successor_model.llm(dtype).with_drafter(made, verify=verify)


WRITTEN = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0))  # as hydra_choices are


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["state", "first", "last"])
@pytest.mark.parametrize(
    "options",
    [{}, {"tree_nodes": 12}, {"branching": (2, 1, 1, 1)}, {"tree": WRITTEN}, {"min_confidence": 0.3}],
    ids=str,
)
def test_heads_that_know_the_target_are_never_wrong(options: dict[str, Any], kind: str, dtype: torch.dtype) -> None:
    """If the state, a token read or the head is off by one, no token is accepted."""
    llm = drafting(seer(kind), dtype=dtype, **options)
    for done in llm.generate([[3], [5, 12], [9] * 20], GREEDY):
        assert done.stats.target_passes == 1 + 8  # one token from the prompt's step, five from each that drafts
        assert done.stats.accepted_at == (8, 8, 8, 8)
    assert llm.engine.drafter.num_failures == 0


@pytest.mark.parametrize("kind", ["state", "first", "last"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_heads_one_position_off_are_never_right(shift: int, kind: str) -> None:
    """The test above has teeth."""
    done = drafting(seer(kind, shift)).generate([[3], [5, 12]], GREEDY)
    assert sum(c.stats.num_accepted for c in done) == 0
    assert sum(c.stats.num_drafted for c in done) > 0


@pytest.mark.parametrize("verify", ["match", "reject", "block"])
@pytest.mark.parametrize("options", [{}, {"branching": (2, 2, 1, 1)}, {"tree_nodes": 8}], ids=str)
def test_sampled_drafts_of_heads_that_know_are_mostly_right(options: dict[str, Any], verify: str) -> None:
    llm = drafting(seer("last", is_lean=True), verify=verify, **options)
    done = llm.generate([[3], [5, 12], [9] * 20], Sampling(max_tokens=60, temperature=1, seed=4))
    assert sum(c.stats.acceptance_length for c in done) > 3 * 3  # the likeliest token has a probability of 0.95
    assert llm.engine.drafter.num_failures == 0


def test_another_state_of_the_target_is_read_where_the_heads_were_trained_on_one() -> None:
    """The residual stream before the norm holds the token itself, at another size; a layer less is the embedding."""
    for offset, tap in ((0, AFTER_FINAL_NORM), (1, 0)):
        checkpoint = seer("state")
        shape = replace(checkpoint.shape, offset=offset)  # type: ignore[type-var]
        made = hydra.from_checkpoint(hydra.Config(), replace(checkpoint, shape=shape), successor_model.context(4))
        assert made.spec.hidden_layers == (tap,)
        done = successor_model.llm().with_drafter(made).generate([[3]], GREEDY)[0]
        assert done.stats.accepted_at == (8, 8, 8, 8)


def random_heads(shape: HydraShape) -> dict[str, Tensor]:
    torch.manual_seed(6)
    network = HydraHeads(shape, successor_model.llm().target).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return dict(network.state_dict())


def formula(tensors: dict[str, Tensor], seen: list[Tensor], head: int, lm_head: Tensor) -> Tensor:
    """Logits [R, V] of a head from the state and the embeddings that it reads, written out from the paper."""

    def linear(name: str, x: Tensor) -> Tensor:
        bias = tensors.get(f"{name}.bias")
        return x @ tensors[f"{name}.weight"].T + (0 if bias is None else bias)

    x = torch.cat(seen, 1)
    if f"hydra_reduce.{head}.weight" in tensors:
        x = linear(f"hydra_reduce.{head}", x)
    layer = 0
    while f"hydra_mlp.{head}.{layer}.linear.weight" in tensors:
        z = linear(f"hydra_mlp.{head}.{layer}.linear", x)
        x = (linear(f"hydra_mlp.{head}.0.res_connection", x) if layer == 0 else x) + z / (1 + torch.exp(-z))
        layer += 1
    return linear(f"hydra_lm_head.{head}", x) if f"hydra_lm_head.{head}.weight" in tensors else x @ lm_head.T


SHAPES = [HydraShape(V, V, 3, layers, own, rank) for layers in (1, 3) for own in (True, False) for rank in (None, 20)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.num_layers}-{s.has_own_head}-{s.rank}")
def test_steps_and_network_have_the_numbers_of_the_formula(shape: HydraShape, dtype: torch.dtype) -> None:
    """The state before the tokens, the tokens in order, SiLU on the right half: else it is a plausible draft."""
    if dtype in DTYPE_KINDS and load_library() is None:
        pytest.skip("the native kernels are not installed")
    tensors, target = random_heads(shape), successor_model.llm(dtype).target
    hidden = torch.randn(4, V, dtype=torch.float64).to(dtype)
    tokens = [[3, 9, 1, 7], [9, 9, 40, 2], [0, 5, 5, 47]]
    products = LinearFactory(successor_model.context(3, dtype))
    assert products.is_native == (dtype in DTYPE_KINDS)
    steps, network = HydraStepRunner(shape, tensors, 3, products, target, V), HydraHeads(shape, target).double()
    network.load_state_dict(tensors)
    states, trained = steps.begin(hidden), network.begin(hidden)
    native = steps.make_native()
    assert (native is None) == (dtype == torch.float64)
    native_states = hidden if native is None else native.begin(hidden)
    lm_head, rows = (x.double() for x in (target.model.get_output_embeddings().weight, target.embedding))
    seen = [hidden.double()]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for head, token in enumerate(tokens):
        seen.append(rows[token])
        wanted = formula(tensors, seen, head, lm_head)
        states, logits = steps(head, states, token)
        assert (logits.double() - wanted).norm() <= tolerance * wanted.norm()
        if native is not None:
            native_states, logits = native(head, native_states, token)
            assert (logits.double() - wanted).norm() <= tolerance * wanted.norm()
            assert torch.equal(native_states, states.float())
        trained = network(head, trained, torch.tensor(token))
        learnt = network.compute_logits(head, trained)
        assert (learnt.double() - wanted).norm() <= max(tolerance, 1e-10) * wanted.norm()


def test_a_draft_is_no_deeper_than_there_are_heads() -> None:
    assert hydra.from_checkpoint(hydra.Config(), seer("last", heads=2), successor_model.context(8)).spec.max_nodes == 2
    tree = hydra.from_checkpoint(hydra.Config(tree=WRITTEN), seer("last"), successor_model.context(2))
    assert tree.spec.max_nodes == len(WRITTEN)  # a tree that was written down is what it is


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"branching": (2, 2, 1, 1, 1)}, "5 deep, and there are 4 heads"),
        ({"branching": (2, 1), "tree_nodes": 4}, "without tree_nodes"),
        ({"tree": ((0,),), "top_k": 4}, "without tree_nodes"),
        ({"tree": ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0))}, "deeper than there are heads"),
        ({"tree": ((1,),)}, "elder sibling"),
        ({"tree_nodes": 0}, "must be positive"),
        ({"min_confidence": -0.1}, "min_confidence"),
    ],
)
def test_options_that_make_no_draft_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ForedraftError, match=why):
        drafting(seer("last"), **options)


def make_trainee(**options: Any) -> Any:
    return hydra.create_trainee(hydra.TrainConfig(**options), tiny_models.plain().target)


@pytest.mark.parametrize("options", [{}, {"layers": 2, "own_head": False}, {"rank": 40}])
def test_new_heads_say_what_the_target_says(options: dict[str, Any]) -> None:
    target, trainee = tiny_models.plain().target, make_trainee(heads=2, **options)
    states, tokens = torch.randn(5, 32), torch.tensor([4, 5, 6, 7, 8])
    wanted, seen = target.compute_logits(states.double()), states
    for head in range(2):
        seen = trainee.network(head, trainee.network.begin(seen), tokens)
        assert torch.allclose(trainee.network.compute_logits(head, seen).double(), wanted, atol=1e-4)


def test_a_rank_keeps_what_the_target_reads_most() -> None:
    target, trainee = tiny_models.plain().target, make_trainee(heads=1, rank=8)
    said = target.head_weight.float()
    top = torch.linalg.svd(said).Vh[:8]
    states = torch.randn(5, 32)
    seen = trainee.network(0, trainee.network.begin(states), torch.tensor([4, 5, 6, 7, 8]))
    assert torch.allclose(trainee.network.compute_logits(0, seen), states @ top.T @ top @ said.T, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_training_runs_every_position_as_drafting_would(loss: str) -> None:
    """The loss is vectorised over positions that drop out one by one; the check goes position by position."""
    trace = tiny_heads.make_trace(tiny_models.plain(), (AFTER_FINAL_NORM,))
    shown = torch.rand(trace.mask.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    trace = replace(trace, mask=trace.mask & shown)
    target, trainee = tiny_models.plain().target, make_trainee(loss=loss, heads=3, rank=12, decay=0.5)
    for name, parameter in trainee.network.named_parameters():
        if "lm_head" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    tensors = {k: v.double() for k, v in trainee.network.state_dict().items()}
    found = trainee.compute_loss(trace)
    losses: list[list[Tensor]] = [[], [], []]
    for b in range(len(trace.features)):
        for i in range(trace.features.shape[1]):
            seen, end = [trace.features[b, i][None].double()], i + 1
            while end < trace.mask.shape[1] and trace.mask[b, end] and (depth := end - i - 2) < 3:
                if depth >= 0:  # the root, and every token above, is one to learn
                    log_probs, token = (
                        trace.target_log_probs.select((b, slice(end - 1, end))),
                        trace.tokens[b, end][None],
                    )
                    logits = formula(tensors, seen, depth, torch.zeros(0))
                    losses[depth].append(compute_draft_loss(loss, logits, log_probs, token).mean())
                seen.append(target.embedding[trace.tokens[b, end]][None])
                end += 1
    means = [float(torch.stack(x).mean()) for x in losses]
    for depth, mean in enumerate(means):
        assert found.components[f"loss_{depth + 1}"] == pytest.approx(mean, rel=1e-4)
    assert float(found.total) == pytest.approx((means[0] + 0.5 * means[1] + 0.25 * means[2]) / 1.75, rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"own_head": False, "rank": 12, "layers": 2}])
def test_trained_heads_are_read_back(options: dict[str, Any], tmp_path: Any) -> None:
    target, trainee = tiny_models.plain().target, make_trainee(heads=3, **options)
    layout = trainee.to_checkpoint()
    tensors, config = layout.tensors, layout.config
    assert (config["hydra_num_heads"], config["hydra_head_arch"], config["hidden_state_offset"]) == (3, "mlp", 0)
    assert config.get("foredraft_lm_head") == (None if not options else "target")
    save(tmp_path, CheckpointLayout("hydra", tensors, config))
    llm = tiny_models.plain().with_drafter({"method": "hydra", "model": str(tmp_path), "tree_nodes": 9})
    assert llm.engine.drafter.spec.max_nodes == 9
    loaded = read(str(tmp_path), describe_target(target), "hydra")
    assert loaded.shape == trainee.network.shape
    assert all(torch.equal(loaded.tensors[name], t) for name, t in tensors.items())
    again = hydra.create_trainee(hydra.TrainConfig(), target, loaded)
    assert all(torch.equal(again.network.state_dict()[name], t) for name, t in tensors.items())


def test_heads_in_the_authors_file_draft_as_they_were_written(tmp_path: Any) -> None:
    checkpoint = seer("last")
    write(tmp_path, "hydra", checkpoint.shape, checkpoint.tensors)
    assert (tmp_path / "hydra_lm_head.pt").exists()
    made = create_drafter(
        hydra.METHOD,
        hydra.Config(),
        DrafterContext(V, successor_model.llm().target, 4, str(tmp_path), dtype=torch.float64),
    )
    done = successor_model.llm().with_drafter(made).generate([[3]], GREEDY)
    assert done[0].stats.accepted_at == (8, 8, 8, 8)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"heads": 0}, "heads and layers must be positive"),
        ({"layers": 0}, "heads and layers must be positive"),
        ({"rank": 0}, "rank must be positive"),
        ({"decay": 0.0}, "decay"),
        ({"loss": "mse"}, "unknown loss"),
    ],
)
def test_training_options_that_make_no_sense_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ForedraftError, match=why):
        make_trainee(**options)


def test_other_heads_are_not_taken_for_these() -> None:
    other = tiny_heads.MEDUSA.get_checkpoint(tiny_models.plain())
    with pytest.raises(ForedraftError, match="no Hydra heads but fitted"):
        hydra.from_checkpoint(hydra.Config(), other, successor_model.context(4))
    with pytest.raises(ForedraftError, match="cannot be trained on"):
        hydra.create_trainee(hydra.TrainConfig(), tiny_models.plain().target, other)


@pytest.mark.parametrize("kind", ["state", "last"])
@pytest.mark.parametrize("options", [{}, {"tree_nodes": 12}], ids=str)
def test_heads_behind_a_layer_that_adds_nothing_know_as_much_as_without(kind: str, options: dict[str, Any]) -> None:
    """The newest state that went through the layer, at the newest position, and no other."""
    checkpoint, target = seer(kind), successor_model.llm().target
    layer = hydra.create_trainee(hydra.TrainConfig(heads=1, prefix=True), target).network
    held = {name: value for name, value in layer.state_dict().items() if name.startswith("prefix")}
    shape = replace(checkpoint.shape, prefix=layer.shape.prefix)  # type: ignore[type-var]
    llm = drafting(replace(checkpoint, shape=shape, tensors=checkpoint.tensors | held), **options)
    for done in llm.generate([[3], [5, 12], [9] * 20], GREEDY):
        assert done.stats.accepted_at == (8, 8, 8, 8)
    assert llm.engine.drafter.num_failures == 0


def test_a_prefix_layer_learns_and_is_read_back(tmp_path: Any) -> None:
    """It is saved under the published names; its gradient comes from every head, over the states before."""
    llm, trainee = tiny_models.plain(), make_trainee(heads=2, prefix=True)
    assert trainee.compute_loss(tiny_heads.make_trace(llm, (AFTER_FINAL_NORM,))).total.isfinite()
    trainee.compute_loss(tiny_heads.make_trace(llm, (AFTER_FINAL_NORM,))).total.backward()
    assert trainee.network.prefix_embeding_layer.layers[0].self_attn.o_proj.weight.grad.abs().sum() > 0
    layout = trainee.to_checkpoint()
    tensors, config = layout.tensors, layout.config
    assert config["hydra_head_arch"] == "prefix-mlp"
    assert "hydra_mlp.1.1.res_connection.weight" in tensors
    save(tmp_path, CheckpointLayout("hydra", tensors, config))
    loaded = read(str(tmp_path), describe_target(llm.target), "hydra")
    assert loaded.shape == trainee.network.shape
    again = hydra.create_trainee(hydra.TrainConfig(), llm.target, loaded).network.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in trainee.network.state_dict().items())


def test_a_prefix_layer_of_other_proportions_than_the_targets_is_refused() -> None:
    target = tiny_models.plain().target
    shape = replace(make_trainee(heads=1, prefix=True).network.shape, prefix=HydraPrefixShape(32, 32, 64))
    checkpoint = Checkpoint("hydra", "made", "a folder", shape, {})
    for make in (
        lambda: hydra_network.load_prefix_layer(checkpoint, target),
        lambda: hydra.create_trainee(hydra.TrainConfig(), target, checkpoint),
    ):
        with pytest.raises(ForedraftError, match="a folder: its prefix layer has 32 rows of queries, 32 of keys"):
            make()
