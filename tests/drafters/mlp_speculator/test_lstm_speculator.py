"""The speculator with an LSTM cell: its formulas, trees of states, training losses, folders.

Guards against gates in another order, a cell that is lost between steps, and the cell of another node.
"""

import math
from dataclasses import replace

import pytest
import torch

from foredraft import ForedraftError, Sampling
from foredraft.checkpoints.write import save
from foredraft.drafters.checkpoint_folders import read
from foredraft.drafters.common.last_hidden_state import LinearFactory
from foredraft.drafters.common.target_access import describe_target
from foredraft.drafters.losses import compute_draft_loss
from foredraft.drafters.mlp_speculator import method as mlp_speculator
from foredraft.drafters.mlp_speculator.lstm_network import LSTMSpeculator, LSTMStepRunner
from foredraft.drafters.mlp_speculator.shape import MlpSpeculatorShape
from foredraft.kernels.cpu.library import load_library
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from tests.support import successor_model, tiny_heads, tiny_models
from tests.support.tiny_heads import HeadCase

V = successor_model.V
TOKENS = [[3, 9, 1, 7], [9, 9, 40, 2], [0, 5, 5, 47]]
SPECULATOR = HeadCase.from_options("mlp_speculator", 2e-2, n_predict=4, inner=48, cell="lstm")


def make_weights(shape):
    torch.manual_seed(4)
    network = LSTMSpeculator(shape).double()
    for name, parameter in network.named_parameters():
        torch.nn.init.normal_(parameter, std=0.4, mean=1.0 if "_ln" in name else 0.0)
    return dict(network.state_dict())


def formula(tensors, shape, hidden, tokens):
    """Compute the logits after each of the tokens [step][row], gate by gate."""

    def norm(x, kind):
        x = x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-6)
        return x if kind is None else x * tensors[f"{kind}.0.weight"] + tensors[f"{kind}.0.bias"]

    def gelu(x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    def gate(kind, i, state, z):
        return state @ tensors[f"{kind}_proj.{min(i, 1)}.weight"].T + (add / keep) * z

    keep = 0.5 ** (0.5 / shape.n_predict)
    add = math.sqrt((1 - keep * keep) * (shape.inner / 2))
    state = norm(hidden, None) / math.sqrt(2) if shape.scales_input else hidden
    cell = torch.zeros(len(hidden), shape.inner, dtype=hidden.dtype)
    found = []
    for i, token in enumerate(tokens):
        z = tensors["forget_emb.0.weight"][token]
        forget, take, give = (1 / (1 + torch.exp(-gate(k, i, state, z))) for k in ("forget", "input", "output"))
        cell = cell * forget + take * gelu(norm(gate("cell", i, state, z), "cell_ln"))
        state = give * gelu(norm(cell, "state_ln"))
        found.append(state @ tensors["head.0.weight"].T)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inner", "scales_input"), [(V, False), (32, True)])
def test_steps_and_network_have_the_numbers_of_the_formula(inner, scales_input, dtype):
    shape = MlpSpeculatorShape(V, inner, V, 3, is_tied=True, scales_input=scales_input, is_lstm=True)
    tensors = make_weights(shape)
    hidden = (3 * torch.randn(4, V, dtype=torch.float64)).to(dtype)
    wanted = formula(tensors, shape, hidden.double(), TOKENS)
    runner = LSTMStepRunner(shape, tensors, LinearFactory(successor_model.context(3, dtype)), V)
    network = LSTMSpeculator(shape).double()
    network.load_state_dict(tensors)
    states, trained = runner.begin(hidden), network.begin(hidden.double())
    native = runner.make_native(3)
    assert (native is None) == (dtype == torch.float64 or load_library() is None)
    native_states = hidden if native is None else native.begin(hidden)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for i, token in enumerate(TOKENS):
        states, logits = runner(i, states, token)
        assert (logits.double() - wanted[i]).norm() <= tolerance * wanted[i].norm()
        trained = network(i, trained, torch.tensor(token))
        assert torch.allclose(network.compute_logits(i, trained), wanted[i], atol=1e-10)
        if native is not None:
            native_states, logits = native(i, native_states, token)
            assert (logits.double() - wanted[i]).norm() <= tolerance * wanted[i].norm()
            assert torch.allclose(native_states, states, atol=tolerance)


def test_every_node_of_a_tree_goes_on_from_its_own_state_and_cell():
    """The children of each node have to be the likeliest after the path of that node, computed alone."""
    checkpoint = SPECULATOR.get_checkpoint(tiny_models.plain())
    tensors = {name: tensor.double() for name, tensor in checkpoint.tensors.items()}
    drafter = SPECULATOR.make_drafter(3, tree_nodes=9, top_k=3)
    llm = tiny_models.plain().with_drafter(drafter)
    seen = []
    propose = drafter.propose

    def spy(batch):
        tree = propose(batch)
        for b in batch.find_drafting():
            state = drafter._states.get(batch.requests[b])
            for node, below in enumerate(tree.children[b]):
                if state is not None and below:
                    path = [batch.get_root_token(b), *tree.get_draft_path(b, node)]
                    seen.append((state, path, [tree.tokens[b][child] for child in below]))
        return tree

    drafter.propose = spy
    done = llm.generate([[33], [44, 45], [7]], Sampling(max_tokens=16, temperature=0, ignore_eos=True))
    assert sum(c.stats.num_accepted for c in done) > 0
    assert len(seen) > 60
    assert max(len(path) for _, path, _ in seen) == 3
    for state, path, children in seen:
        logits = formula(tensors, checkpoint.shape, state[None].double(), [[t] for t in path])[-1][0]
        assert children == logits.topk(len(children)).indices.tolist()


def test_training_runs_every_position_as_drafting_would():
    trace = tiny_heads.make_trace(tiny_models.plain(), (AFTER_FINAL_NORM,))
    config = mlp_speculator.TrainConfig(loss="kl", n_predict=2, inner=24, cell="lstm", decay=0.5)
    trainee = mlp_speculator.create_trainee(config, tiny_models.plain().target)
    found = trainee.compute_loss(trace)
    shape, tensors = trainee.network.shape, {k: v.double() for k, v in trainee.network.state_dict().items()}
    losses = [[], []]
    for b in range(trace.features.shape[0]):
        for i in range(trace.features.shape[1]):
            depth = 0  # tokens to learn below the root, which is i + 1
            while depth < 2 and i + 2 + depth < trace.mask.shape[1] and trace.mask[b, i + 1 : i + 3 + depth].all():
                depth += 1
            tokens = [[int(trace.tokens[b, i + 1 + d])] for d in range(depth)]
            logits = formula(tensors, shape, trace.features[b, i][None].double(), tokens)
            for d in range(depth):
                log_probs = trace.target_log_probs.select((b, slice(i + 1 + d, i + 2 + d)))
                losses[d].append(
                    compute_draft_loss("kl", logits[d], log_probs, trace.tokens[b, i + 2 + d][None]).mean()
                )
    means = [torch.stack(x).mean() for x in losses]
    assert float(found.total.detach()) == pytest.approx(float(means[0] + 0.5 * means[1]) / 1.5, rel=1e-4)


def test_a_trained_speculator_is_read_back_and_drafts(tmp_path):
    target = tiny_models.plain().target
    trainee = mlp_speculator.create_trainee(mlp_speculator.TrainConfig(n_predict=3, inner=24, cell="lstm"), target)
    save(tmp_path, trainee.to_checkpoint())
    loaded = read(str(tmp_path), describe_target(target), "mlp_speculator")
    assert loaded.shape == replace(trainee.network.shape, branching=(4, 3, 2), candidates=5)
    again = mlp_speculator.create_trainee(mlp_speculator.TrainConfig(), target, loaded)
    assert all(torch.equal(x, again.network.state_dict()[name]) for name, x in trainee.network.state_dict().items())
    llm = tiny_models.plain().with_drafter({"method": "mlp_speculator", "model": str(tmp_path)})
    assert llm.generate([[5, 9]], Sampling(max_tokens=8, temperature=0))[0].stats.num_drafted > 0


@pytest.mark.parametrize(
    ("options", "why"), [({"cell": "gru"}, "layer, lstm"), ({"cell": "lstm", "tied": False}, "leave tied=false out")]
)
def test_training_options_that_make_no_sense_are_errors(options, why):
    with pytest.raises(ForedraftError, match=why):
        mlp_speculator.create_trainee(mlp_speculator.TrainConfig(**options), tiny_models.plain().target)
