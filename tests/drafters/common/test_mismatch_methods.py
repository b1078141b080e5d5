"""Every trained method notices that its weights belong to another target: alone, in an ensemble, behind the policy."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import LLM, Sampling
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.draft_model.drafter import DraftModel
from foredraft.drafters.ensemble.drafter import EnsembleDrafter
from foredraft.drafters.ensemble.members import EnsembleMember
from foredraft.drafters.ensemble.selector import SelectionMode
from foredraft.drafters.interface import Drafter
from foredraft.drafters.method import DrafterContext, Method
from foredraft.drafters.registry import load_methods
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.engine_setup import create_length_policy
from foredraft.models.hf import HFModel
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree
from tests.support import tiny_models, tiny_vocabularies
from tests.support.method_cases import METHOD_CASES
from tests.support.requests import make_request
from tests.support.tiny_heads import TRAIN_PROMPTS

VOCAB = 2003  # so many tokens that a random draft is almost never right
PROMPTS = [[i, i + 1] for i in range(5, 25)]
# Greedy: the distributions of tiny random models are so flat that they overlap, and samples of a stranger are accepted.
GREEDY = Sampling(max_tokens=60, temperature=0, ignore_eos=True)
SAID = "almost never accepted"


@cache
def make_target() -> LLM:
    return LLM(tiny_models.llama(VOCAB), None, is_debug=True)


def randomise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace all weights by random ones: the right sizes, and no relation to the target.

    They are large, because an early-exit adapter adds to the target's own states.
    """
    generator = torch.Generator().manual_seed(7)
    return {
        name: tensor
        if not tensor.is_floating_point()
        else 3.0 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in tensors.items()
    }


def list_heads() -> Iterator[tuple[str, tuple[Method, dict[str, Any]]]]:
    """List every method with weights in a file, in all its variants that are trained differently."""
    for name, method in load_methods().items():
        settings = {tuple(v.training.items()) for v in method.variants if v.training is not None}
        for number, training in enumerate(sorted(settings, key=str)):
            yield f"{name} {number}" if number else name, (method, dict(training))


HEADS = dict(list_heads())
CROSS_VOCAB = ("draft_model, tli", "draft_model, slem")
STRANGERS = (*HEADS, "draft_model")


def make_stranger(name: str) -> Drafter:
    """Make a drafter of a method whose weights do not belong to the target."""
    if name == "draft_model":
        context = DrafterContext(VOCAB, num_speculative_tokens=4, model="org/draft", dtype=torch.float64)
        return DraftModel(HFModel.wrap_model(tiny_models.llama(VOCAB, seed=9), "draft"), context)
    method, settings = HEADS[name]
    target = make_target().target
    trainee: Any = method.training.create_trainee(method.training.config(loss="ce", **settings), target, None)
    if trainee.spec.prepare is not None:
        trainee.spec.prepare(torch.ones(VOCAB, dtype=torch.int64))
    tensors = {key: tensor.detach() for key, tensor in trainee.network.state_dict().items()}
    head = Checkpoint(method.name, "made", "a made head", trainee.network.shape, randomise(tensors))
    context = DrafterContext(VOCAB, target, 4, model="org/head", dtype=torch.float64)
    return method.from_checkpoint(method.config(), head, context)


def make_cross_vocab_stranger(name: str) -> Drafter:
    """Make a draft model of other letters, with random weights, for the tiny target."""
    drafter = tiny_vocabularies.drafter(name.partition(", ")[2], 4)
    wrapped = HFModel.wrap_model(tiny_models.llama(drafter.lm.vocab_size, seed=12), "draft")
    context = DrafterContext(tiny_models.VOCAB, num_speculative_tokens=4, dtype=torch.float64)
    return type(drafter)(wrapped, context, tiny_vocabularies.letters(), None, 8192)


def make_ensemble(drafter: Drafter, mode: SelectionMode) -> EnsembleDrafter:
    parts = [("stranger", drafter), ("ngram", METHOD_CASES["ngram"].make(4))]
    return EnsembleDrafter([EnsembleMember(n, d, SandboxedDrafter(d, VOCAB)) for n, d in parts], mode, "both")


def count_warnings(caplog) -> int:
    return len([message for message in caplog.messages if SAID in message])


def test_every_trained_method_is_among_the_cases():
    trained = {name for name, m in load_methods().items() if m.training is not None and m.training.create_trainee}
    assert trained <= {name.split()[0] for name in STRANGERS}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_named_once(name, caplog):
    make_target().with_drafter(make_stranger(name)).generate(PROMPTS, GREEDY)
    assert count_warnings(caplog) == 1


@pytest.mark.parametrize("name", CROSS_VOCAB)
def test_a_stranger_with_another_vocabulary_is_named_once(name, caplog):
    drafter = make_cross_vocab_stranger(name)
    tiny_models.plain().with_drafter(drafter).generate(PROMPTS, GREEDY)
    assert count_warnings(caplog) == 1


@pytest.mark.parametrize("name", ["draft_model", *CROSS_VOCAB, "medusa", "eagle", "early_exit, adapter"])
def test_a_drafter_that_fits_is_not_named(name, caplog):
    drafter = METHOD_CASES[name].make(4)
    tiny_models.plain().with_drafter(drafter).generate(TRAIN_PROMPTS * 4, replace(GREEDY, max_tokens=28))
    assert drafter.mismatch_detector.num_drafts > 44
    assert not count_warnings(caplog)


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_in_a_merged_tree_is_named_once(name, caplog):
    """Fault: the right drafts of the other member counted as its own."""
    llm = make_target().with_drafter(make_ensemble(make_stranger(name), "merge"))
    llm.generate(PROMPTS, GREEDY)
    assert count_warnings(caplog) == 1


@pytest.mark.parametrize("name", ["draft_model", "medusa"])
def test_a_stranger_is_named_although_the_ensemble_hardly_chooses_it(name, caplog):
    llm = make_target().with_drafter(make_ensemble(make_stranger(name), "auto"))
    for _ in range(4):
        llm.generate(PROMPTS, replace(GREEDY, max_tokens=100))
    assert count_warnings(caplog) == 1


@pytest.mark.parametrize("name", ["draft_model", "medusa", "eagle3"])
def test_a_stranger_is_named_although_the_policy_stops_its_drafts(name, caplog):
    """Fault: after the first steps the policy grants probes alone, and the drafts to decide from never came."""
    drafter = make_stranger(name)
    llm = make_target().with_drafter(drafter)
    llm.engine.length_policy = create_length_policy(drafter)
    for _ in range(300):  # the distance of the probes depends on measured times
        llm.generate(PROMPTS[:4], replace(GREEDY, max_tokens=100))
        if drafter.mismatch_detector.is_mismatched:
            break
    assert count_warnings(caplog) == 1


def test_an_ensemble_in_training_is_silent(caplog):
    """Fault: an ensemble did not pass `silence_mismatch` on to its members."""
    stranger = make_stranger("draft_model")
    ensemble = make_ensemble(stranger, "merge")
    ensemble.spec.silence_mismatch()
    make_target().with_drafter(ensemble).generate(PROMPTS, GREEDY)
    assert stranger.mismatch_detector.is_mismatched
    assert not count_warnings(caplog)


def test_early_exit_without_an_adapter_has_no_other_target(caplog):
    """The first layers of a target that was not trained for it may never agree with the whole."""
    drafter = METHOD_CASES["early_exit"].make(4)
    drafter.mismatch_detector.num_drafts = 44  # without an accepted first token
    drafter.mismatch_detector.record_proposal(*make_step())
    drafter.mismatch_detector.record_commit(make_step()[0], Commit.from_lists([[0]], [[5]]))
    assert drafter.mismatch_detector.is_mismatched
    assert not count_warnings(caplog)


def make_step() -> tuple[Batch, TokenTree]:
    batch = Batch((make_request(0, [1, 2], GREEDY, seed=1),), (1,), (1,))
    return batch, TokenTree.from_lists([[2, 3]], [[-1, 0]])


def test_every_engine_names_its_own_drafter(caplog):
    for _ in range(2):
        make_target().with_drafter(make_stranger("draft_model")).generate(PROMPTS, GREEDY)
    assert count_warnings(caplog) == 2
