"""The MLP speculator: its formulas, which state and token predict which token, trees of states, training losses."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import LLM, Sampling
from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.checkpoints.write import save
from foredraft.drafters.checkpoint_folders import read
from foredraft.drafters.common.last_hidden_state import LinearFactory
from foredraft.drafters.common.step_drafter import GrowingStepDraft, grow_drafts
from foredraft.drafters.common.target_access import describe_target
from foredraft.drafters.common.tree_builder import TreeBuilder
from foredraft.drafters.draft import Draft
from foredraft.drafters.losses import compute_draft_loss
from foredraft.drafters.mlp_speculator import method as mlp_speculator
from foredraft.drafters.mlp_speculator.network import MLPSpeculator, MLPStepRunner
from foredraft.drafters.mlp_speculator.shape import MlpSpeculatorShape
from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.linear import DTYPE_KINDS
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.verification.rules import MATCH, REJECT
from tests.support import successor_model, tiny_heads, tiny_models
from tests.support.requests import make_request
from tests.support.tiny_heads import SPECULATOR

V = successor_model.V
GREEDY = Sampling(max_tokens=41, temperature=0)


def seer(kind: str, shift: int = 0, steps: int = 4) -> Checkpoint:
    """Make exact heads for the successor target that read only the drafted tokens ("tokens") or only the target's state
    ("state"). In the second, step i gives the token i + 2 positions later. Each kind is wrong without its input."""
    zero, one = torch.zeros(V, V, dtype=torch.float64), torch.eye(V, dtype=torch.float64)
    tensors: dict[str, Tensor] = {}
    for i in range(steps):
        tensors[f"emb.{i}.weight"] = one if kind == "tokens" else zero
        tensors[f"proj.{i}.weight"] = one if kind == "state" else zero
        tensors[f"ln.{i}.weight"] = torch.ones(V, dtype=torch.float64)
        tensors[f"ln.{i}.bias"] = torch.zeros(V, dtype=torch.float64)
        tensors[f"head.{i}.weight"] = successor_model.power((1 if kind == "tokens" else i + 2) + shift)
    shape = MlpSpeculatorShape(V, V, V, steps, branching=(2, 2, 1, 1)[:steps])
    return Checkpoint("mlp_speculator", "made", "made", shape, tensors)


def drafting(
    checkpoint: Checkpoint,
    num_tokens: int = 4,
    dtype: torch.dtype = torch.float64,
    verify: str = "match",
    **options: Any,
) -> LLM:
    config = mlp_speculator.Config(**options)
    made = mlp_speculator.from_checkpoint(config, checkpoint, successor_model.context(num_tokens, dtype))
    return successor_model.llm(dtype).with_drafter(made, verify=verify)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["tokens", "state"])
@pytest.mark.parametrize(
    "options", [{}, {"tree_nodes": 12}, {"branching": (2, 1, 1, 1)}, {"min_confidence": 0.3}], ids=str
)
def test_a_speculator_that_knows_the_target_is_never_wrong(options: dict, kind: str, dtype: torch.dtype) -> None:
    """If the state, the token read or the step is off by one, no token is accepted."""
    llm = drafting(seer(kind), dtype=dtype, **options)
    for done in llm.generate([[3], [5, 12], [9] * 20], GREEDY):
        assert done.stats.target_passes == 1 + 8  # one token from the prompt's step, five from each that drafts
        assert done.stats.accepted_at == (8, 8, 8, 8)
    assert llm.engine.drafter.num_failures == 0


@pytest.mark.parametrize("kind", ["tokens", "state"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_speculator_one_position_off_is_never_right(shift: int, kind: str) -> None:
    """The test above has teeth."""
    done = drafting(seer(kind, shift)).generate([[3], [5, 12]], GREEDY)
    assert sum(c.stats.num_accepted for c in done) == 0
    assert sum(c.stats.num_drafted for c in done) > 0


@pytest.mark.parametrize("verify", ["match", "reject", "block"])
@pytest.mark.parametrize("options", [{}, {"branching": "published"}, {"tree_nodes": 8}], ids=str)
def test_sampled_drafts_of_a_speculator_that_knows_are_mostly_right(options: dict[str, Any], verify: str) -> None:
    llm = drafting(seer("tokens"), verify=verify, **options)
    done = llm.generate([[3], [5, 12], [9] * 20], Sampling(max_tokens=60, temperature=1, seed=4))
    assert sum(c.stats.acceptance_length for c in done) > 3 * 3  # the likeliest token has a probability of 0.95
    assert llm.engine.drafter.num_failures == 0


def random_speculator(shape: MlpSpeculatorShape) -> dict[str, Tensor]:
    torch.manual_seed(4)
    network = MLPSpeculator(shape).double()
    for name, parameter in network.named_parameters():
        torch.nn.init.normal_(parameter, std=0.4, mean=1.0 if name.startswith("ln") else 0.0)
    return dict(network.state_dict())


def formula(
    tensors: dict[str, Tensor], shape: MlpSpeculatorShape, hidden: Tensor, tokens: list[list[int]]
) -> list[Tensor]:
    """Logits after each of the tokens [step][row], written out from the paper."""

    def rms(x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-6)

    keep = 0.5 ** (0.5 / shape.n_predict)
    add = math.sqrt((1 - keep * keep) * (shape.inner / 2))
    state = rms(hidden) / math.sqrt(2) if shape.scales_input else hidden
    found = []
    for i, token in enumerate(tokens):
        a, b = (0, min(i, 1)) if shape.is_tied else (i, i)
        z = tensors[f"emb.{a}.weight"][token]
        state = state @ tensors[f"proj.{b}.weight"].T + (add / keep) * z
        y = rms(state) * tensors[f"ln.{a}.weight"] + tensors[f"ln.{a}.bias"]
        state = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        found.append(state @ tensors[f"head.{a}.weight"].T)
    return found


SHAPES = [
    MlpSpeculatorShape(V, inner, V, 3, is_tied, scales_input)
    for inner in (V, 32)
    for is_tied in (False, True)
    for scales_input in (False, True)
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.inner}-{s.is_tied}-{s.scales_input}")
def test_steps_and_network_have_the_numbers_of_the_formula(shape: MlpSpeculatorShape, dtype: torch.dtype) -> None:
    """The state's share, the norm's epsilon, the tied index of each matrix: any of them off is a plausible draft."""
    if dtype in DTYPE_KINDS and load_library() is None:
        pytest.skip("the native kernels are not installed")
    tensors = random_speculator(shape)
    hidden = (3 * torch.randn(4, V, dtype=torch.float64)).to(dtype)
    tokens = [[3, 9, 1, 7], [9, 9, 40, 2], [0, 5, 5, 47]]
    wanted = formula(tensors, shape, hidden.double(), tokens)
    products = LinearFactory(successor_model.context(3, dtype))
    assert products.is_native == (dtype in DTYPE_KINDS)
    steps, network = MLPStepRunner(shape, tensors, 3, products, V), MLPSpeculator(shape).double()
    network.load_state_dict(tensors)
    states, trained = steps.begin(hidden), network.begin(hidden.double())
    assert states.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    native = steps.make_native()
    assert (native is None) == (dtype == torch.float64)
    native_states = hidden if native is None else native.begin(hidden)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for i, token in enumerate(tokens):
        states, logits = steps(i, states, token)
        assert (logits.double() - wanted[i]).norm() <= tolerance * wanted[i].norm()
        trained = network(i, trained, torch.tensor(token))
        assert torch.allclose(network.compute_logits(i, trained), wanted[i], atol=1e-10)
        if native is not None:
            native_states, logits = native(i, native_states, token)
            assert (logits.double() - wanted[i]).norm() <= tolerance * wanted[i].norm()
            assert torch.allclose(native_states, states, atol=tolerance)


def test_tied_steps_are_held_once() -> None:
    names = set(MLPSpeculator(MlpSpeculatorShape(8, 8, 11, 4, is_tied=True)).state_dict())
    assert names == {
        "emb.0.weight", "proj.0.weight", "proj.1.weight", "ln.0.weight", "ln.0.bias", "head.0.weight",
    }  # fmt: skip
    assert len(MLPSpeculator(MlpSpeculatorShape(8, 8, 11, 4)).state_dict()) == 5 * 4


def test_weights_use_the_steps_that_were_trained_not_those_that_are_drafted() -> None:
    """A draft of two steps from a speculator of four is the beginning of one of four (some servers deviate)."""
    shape = MlpSpeculatorShape(V, V, V, 4)
    tensors = random_speculator(shape)
    hidden = torch.randn(2, V, dtype=torch.float64)
    wanted = formula(tensors, shape, hidden, [[1, 2], [3, 4]])
    steps = MLPStepRunner(shape, tensors, 2, LinearFactory(successor_model.context(2)), V)
    states, logits = steps(0, steps.begin(hidden), [1, 2])
    assert torch.allclose(logits, wanted[0], atol=1e-10)
    assert torch.allclose(steps(1, states, [3, 4])[1], wanted[1], atol=1e-10)


@pytest.mark.parametrize("options", [{"tree_nodes": 9, "top_k": 3}, {"branching": (3, 2, 1)}], ids=str)
def test_every_node_of_a_tree_goes_on_from_its_own_state(options: dict[str, Any]) -> None:
    """Guards against states of a sibling or of another request: the children of each node have to be the likeliest
    after the path of that node, computed alone."""
    checkpoint = SPECULATOR.get_checkpoint(tiny_models.plain())
    tensors = {name: tensor.double() for name, tensor in checkpoint.tensors.items()}
    drafter = SPECULATOR.make_drafter(3, **options)
    llm = tiny_models.plain().with_drafter(drafter)
    seen: list[tuple[Tensor, list[int], list[int]]] = []
    propose = drafter.propose

    def spy(batch: Any) -> Any:
        tree = propose(batch)
        for b in batch.find_drafting():
            state = drafter._states.get(batch.requests[b])
            if state is not None and tree.sizes[b] > 1:
                for node, below in enumerate(tree.children[b]):
                    if below:
                        children = [tree.tokens[b][child] for child in below]
                        seen.append((state, [batch.get_root_token(b), *tree.get_draft_path(b, node)], children))
        return tree

    drafter.propose = spy  # type: ignore[method-assign]
    llm.generate([[33], [44, 45], [7]], replace(GREEDY, max_tokens=16, ignore_eos=True))
    assert len(seen) > 60
    for state, path, children in seen:
        logits = formula(tensors, checkpoint.shape, state[None].double(), [[t] for t in path])[-1][0]
        assert children == logits.topk(len(children)).indices.tolist()


def test_chains_taken_the_short_way_are_those_of_the_long_one() -> None:
    """Greedy chains do not go through the growth of trees; a threshold that cuts nothing makes them."""
    texts = []
    for options in ({}, {"min_confidence": 1e-12}):
        llm = tiny_models.plain().with_drafter(SPECULATOR.make_drafter(4, **options))
        done = llm.generate([[33], [44, 45], [9]], replace(GREEDY, max_tokens=24, ignore_eos=True))
        texts.append([(c.token_ids, c.stats.num_accepted) for c in done])
    assert texts[0] == texts[1]


def test_no_draft_is_deeper_than_the_steps_that_were_trained() -> None:
    drafter = mlp_speculator.from_checkpoint(
        mlp_speculator.Config(), seer("tokens", steps=2), successor_model.context(8)
    )
    assert drafter.spec.max_nodes == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"branching": (2, 2, 1, 1, 1)}, "5 deep, and the speculator was trained for 4"),
        ({"branching": "wide"}, "published"),
        ({"branching": (2, 0)}, "positive numbers"),
        ({"branching": (2, 1), "tree_nodes": 4}, "without tree_nodes"),
        ({"tree_nodes": 0}, "must be positive"),
        ({"min_confidence": -0.1}, "min_confidence"),
    ],
)
def test_options_that_make_no_draft_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ForedraftError, match=why):
        drafting(seer("tokens"), **options)


def test_a_published_tree_that_is_not_there_is_refused() -> None:
    checkpoint = seer("tokens")
    bare = replace(checkpoint, shape=replace(checkpoint.shape, branching=None))  # type: ignore[type-var]
    with pytest.raises(ForedraftError, match="top_k_tokens_per_head"):
        drafting(bare, branching="published")


@pytest.mark.parametrize("loss", ["ce", "kl", "tv"])
def test_training_runs_every_position_as_drafting_would(loss: str) -> None:
    """The loss is vectorised over positions that drop out one by one; the check goes position by position."""
    trace = tiny_heads.make_trace(tiny_models.plain(), (AFTER_FINAL_NORM,))
    trace = replace(
        trace, mask=trace.mask & (torch.rand(trace.mask.shape, generator=torch.Generator().manual_seed(1)) < 0.7)
    )
    target = tiny_models.plain().target
    config = mlp_speculator.TrainConfig(loss=loss, n_predict=3, inner=24, tied=False, decay=0.5)
    trainee = mlp_speculator.create_trainee(config, target)
    found = trainee.compute_loss(trace)
    shape, tensors = trainee.network.shape, {k: v.double() for k, v in trainee.network.state_dict().items()}
    losses: list[list[Tensor]] = [[], [], []]
    num_rows, length = trace.features.shape[:2]
    for b in range(num_rows):
        for i in range(length):
            depth = 0  # tokens to learn below the root, which is i + 1
            while trace.mask[b, i + 1] and i + 2 + depth <= length and trace.mask[b, i + 2 + depth] and depth < 3:
                depth += 1
            read = [[int(trace.tokens[b, i + 1 + d])] for d in range(depth)]
            logits = formula(tensors, shape, trace.features[b, i][None].double(), read)
            for d in range(depth):
                log_probs, token = (
                    trace.target_log_probs.select((b, slice(i + 1 + d, i + 2 + d))),
                    trace.tokens[b, i + 2 + d],
                )
                losses[d].append(compute_draft_loss(loss, logits[d], log_probs, token[None]).mean())
    means = [torch.stack(x).mean() for x in losses]
    wanted = sum(0.5**d * x for d, x in enumerate(means)) / 1.75
    assert float(found.total.detach()) == pytest.approx(float(wanted), rel=1e-4)
    for d, mean in enumerate(means):
        assert found.components[f"loss_{d + 1}"] == pytest.approx(float(mean), rel=1e-4)


def suffixes_of_the_authors(
    tensors: dict[str, Tensor], shape: MlpSpeculatorShape, hidden: Tensor, root: int
) -> set[tuple[int, ...]]:
    """`generate_suffixes`: every node gets its step's top_k children, and the n likeliest of the leaves are kept, each
    with the path to it."""
    chances: dict[tuple[int, ...], float] = {(): 0.0}
    assert shape.branching is not None
    for width in shape.branching:
        below = {}
        for path, chance in chances.items():
            logits = formula(tensors, shape, hidden[None], [[token] for token in (root, *path)])[-1][0]
            top = logits.log_softmax(-1).topk(width)
            below |= {(*path, int(i)): chance + float(x) for x, i in zip(top.values, top.indices, strict=True)}
        chances = below
    best = sorted(chances, key=lambda path: -chances[path])[: shape.candidates]
    return {path[:n] for path in best for n in range(1, len(path) + 1)}


@pytest.mark.parametrize(("branching", "candidates"), [((5, 4, 3), 5), ((4, 3, 2, 2), 4)])
def test_the_published_tree_holds_the_whole_paths_that_its_authors_verify(
    branching: tuple[int, ...], candidates: int
) -> None:
    """Guards the whole of the tree, which is eight times as many nodes to verify."""
    shape = MlpSpeculatorShape(V, 24, V, len(branching), branching=branching, candidates=candidates)
    tensors = random_speculator(shape)
    context = successor_model.context(4, torch.float64)
    steps = MLPStepRunner(shape, tensors, len(branching), LinearFactory(context), V)
    plan = mlp_speculator.Config(branching="published").to_tree_spec(4, shape)
    for seed in range(5):
        hidden = torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        request = make_request(slot=0, prompt=[1, 2, 3 + seed], sampling=GREEDY, seed=5, rule=MATCH)
        [draft] = grow_drafts(
            steps, [GrowingStepDraft(TreeBuilder(request, plan.restrict(9, 99, False)), batch_index=0, state=hidden)], V
        )
        assert paths_of(draft) == suffixes_of_the_authors(tensors, shape, hidden, 3 + seed)
        [less] = grow_drafts(
            steps, [GrowingStepDraft(TreeBuilder(request, plan.restrict(9, 7, False)), batch_index=0, state=hidden)], V
        )
        assert paths_of(less) < paths_of(draft)
        assert 3 < len(less.tokens) <= 7
        sampled = make_request(slot=0, prompt=[1, 2], sampling=Sampling(max_tokens=9), seed=5, rule=REJECT)
        [drawn] = grow_drafts(
            steps, [GrowingStepDraft(TreeBuilder(sampled, plan.restrict(9, 99, False)), batch_index=0, state=hidden)], V
        )
        assert drawn.q is not None
        assert len(drawn.tokens) == plan.max_nodes == candidates * len(branching)


def paths_of(draft: Draft) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


@pytest.mark.parametrize("tied", [True, False])
def test_a_trained_speculator_is_read_back(tied: bool, tmp_path: Any) -> None:
    target = tiny_models.plain().target
    trainee = mlp_speculator.create_trainee(mlp_speculator.TrainConfig(n_predict=3, inner=24, tied=tied), target)
    layout = trainee.to_checkpoint()
    tensors, config = layout.tensors, layout.config
    assert (config["n_predict"], config["inner_dim"], config["tie_weights"]) == (3, 24, tied)
    save(tmp_path, CheckpointLayout("mlp_speculator", tensors, config))
    options = {"method": "mlp_speculator", "model": str(tmp_path), "branching": "published"}
    llm = tiny_models.plain().with_drafter(options)
    assert llm.engine.drafter.spec.max_nodes == 5 * 3
    loaded = read(str(tmp_path), describe_target(target), "mlp_speculator")
    assert loaded.shape == replace(trainee.network.shape, branching=(4, 3, 2), candidates=5)
    assert all(torch.equal(loaded.tensors[name.removeprefix("speculator.")], t) for name, t in tensors.items())


@pytest.mark.parametrize(
    ("options", "why"),
    [({"n_predict": 0}, "n_predict and inner"), ({"decay": 1.5}, "decay"), ({"loss": "mse"}, "unknown loss")],
)
def test_training_options_that_make_no_sense_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ForedraftError, match=why):
        mlp_speculator.create_trainee(mlp_speculator.TrainConfig(**options), tiny_models.plain().target)
