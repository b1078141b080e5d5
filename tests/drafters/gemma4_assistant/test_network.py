"""Network of a Gemma-4 assistant: equal to the formulas, to transformers' class and to transformers' generator."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import foredraft
from foredraft import LLM, Sampling
from foredraft.checkpoints.schema import TargetInfo
from foredraft.drafters.checkpoint_folders import read
from foredraft.drafters.gemma4_assistant.network import AssistantNetwork, load_network
from foredraft.errors import ForedraftError
from tests.support import gemma4_assistants as tiny
from tests.support import tiny_models
from tests.support.checkpoints import reference_networks
from tests.support.checkpoints.reference_networks import AssistantFlags
from tests.support.gemma4_assistants import ProposalRecorder

KINDS = (tiny.SLIDING, tiny.SLIDING, tiny.FULL)
FLAGS = AssistantFlags(
    4, KINDS, tiny.WINDOW, {tiny.SLIDING: 1e4, tiny.FULL: 1e6}, {tiny.SLIDING: 1.0, tiny.FULL: 0.25}, tiny.CENTROIDS, 3
)
TARGET = TargetInfo("the-target", 32, tiny.VOCAB, 4)
ROWS, LENGTH = 5, 20  # more keys than the window
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[9], [5, 6, 7, 8], [11, 12, 13] * 8]

SharedKV = dict[str, tuple[Tensor, Tensor]]  # by kind of layer: keys and values [1, Hkv, L, D]


def load(folder: Path, is_ordered: bool) -> AssistantNetwork:
    return load_network(read(tiny.save_assistant(folder, is_ordered), TARGET)).double()


def make_inputs() -> tuple[Tensor, Tensor, SharedKV]:
    g = torch.Generator().manual_seed(3)
    embeddings, states = (torch.randn(ROWS, 32, generator=g, dtype=torch.float64) for _ in range(2))
    shared = {
        kind: tuple(torch.randn(1, 2, LENGTH, width, generator=g, dtype=torch.float64) for _ in range(2))
        for kind, width in ((tiny.SLIDING, 16), (tiny.FULL, 32))
    }
    return embeddings, states, shared


def run(network: AssistantNetwork, embeddings: Tensor, states: Tensor, shared: SharedKV) -> tuple[Tensor, Tensor]:
    """Compute logits [R, V] and next states [R, B]; every row sees all keys of its window."""

    def attend(layer: int, query: Tensor) -> Tensor:
        window = network.shape.get_window(layer) or LENGTH
        keys, values = (x[0, :, -window:].repeat_interleave(2, 0) for x in shared[KINDS[layer]])
        weights = torch.einsum("rhd,hld->rhl", query, keys).softmax(-1)
        return torch.einsum("rhl,hld->rhd", weights, values)

    hidden = network(embeddings, states, torch.full((ROWS,), LENGTH), attend)
    return network.compute_logits(hidden), network.post_projection(hidden)


@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
def test_the_network_equals_the_formulas(tmp_path: Path, is_ordered: bool) -> None:
    network = load(tmp_path, is_ordered)
    embeddings, states, shared = make_inputs()
    weights = tiny.make_assistant(is_ordered).state_dict()
    kv = {kind: (keys[0].transpose(0, 1), values[0].transpose(0, 1)) for kind, (keys, values) in shared.items()}
    with torch.no_grad():
        logits, following = run(network, embeddings, states, shared)
    for row in range(ROWS):
        wanted, state = reference_networks.assistant(weights, embeddings[row], states[row], kv, FLAGS)
        torch.testing.assert_close(logits[row], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(following[row], state, rtol=1e-5, atol=1e-5)
    assert torch.isinf(logits).any() == is_ordered


@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
def test_the_network_equals_transformers_class(tmp_path: Path, is_ordered: bool) -> None:
    network, model = load(tmp_path, is_ordered), tiny.make_assistant(is_ordered)
    embeddings, states, shared = make_inputs()
    with torch.no_grad():
        logits, following = run(network, embeddings, states, shared)
        for row in range(ROWS):
            inputs = torch.cat([embeddings[row], states[row]])[None, None]
            found = model(inputs_embeds=inputs, position_ids=torch.tensor([[LENGTH]]), shared_kv_states=shared)
            allowed = logits[row] > -torch.inf
            torch.testing.assert_close(logits[row, allowed], found.logits[0, 0, allowed], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(following[row], found.last_hidden_state[0, 0], rtol=1e-5, atol=1e-5)
            if is_ordered:  # transformers gives all other tokens one logit below the lowest
                assert (found.logits[0, 0, ~allowed] < found.logits[0, 0, allowed].min()).all()
                assert int(allowed.sum()) == 3 * tiny.VOCAB // tiny.CENTROIDS


def generate_candidates(target: Any, assistant: Any, text: list[int], count: int) -> list[int]:
    """Draft with transformers' generator, from the states that the target has after all tokens but the last."""
    config = hf.GenerationConfig(max_length=1000)
    assistant.generation_config.num_assistant_tokens = count
    generator = SinglePositionMultiTokenCandidateGenerator(assistant, target.get_input_embeddings(), config)
    ids = torch.tensor([text])
    with torch.no_grad():
        outputs = target(
            input_ids=ids[:, :-1], use_cache=False, output_hidden_states=True, return_shared_kv_states=True
        )
        found, _ = generator.get_candidates(ids, {}, outputs, is_first_iteration=False, n_last_matches=0)
    return found[0, len(text) :].tolist()


@pytest.mark.parametrize("num_shared", [0, 2, 3])
@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
def test_chains_equal_those_of_transformers_generator(tmp_path: Path, is_ordered: bool, num_shared: int) -> None:
    """Through the pages of a batch. One text is longer than the window. Some targets share keys among layers."""
    compare_chains(tiny.make_llm(num_shared), tmp_path, is_ordered)


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified", "gemma4_unified_text"])
def test_chains_of_every_class_of_targets_equal_the_generators(tmp_path: Path, kind: str) -> None:
    """`gemma4_unified` attends by itself, over a cache on pages."""
    compare_chains(LLM(tiny.make_whole_target(kind), None, is_debug=True), tmp_path, is_ordered=False)


def compare_chains(llm: LLM, folder: Path, is_ordered: bool) -> None:
    """Compare every draft of a batch with that of transformers' generator for the same text."""
    drafter = tiny.make_drafter(tiny.save_assistant(folder, is_ordered), llm, 4)
    recorder = ProposalRecorder(drafter)
    outputs = llm.with_drafter(recorder).generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]
    reference = tiny.copy_with_sdpa(llm.target.model)
    assistant = tiny.make_assistant(is_ordered)
    assert len(recorder.found) >= 24
    assert len({token for found in recorder.found for token in found.tokens}) > 5, "these drafts are all alike"
    for found in recorder.found:
        assert found.tokens == generate_candidates(reference, assistant, found.text, 4)[: len(found.tokens)]


def test_the_output_equals_transformers_assisted_generation(tmp_path: Path) -> None:
    """The whole of `generate` with the assistant, and of `LLM` with its folder."""
    llm = LLM(tiny.make_target(), {"model": str(tiny.save_assistant(tmp_path)), "num_speculative_tokens": 3})
    [completion] = llm.generate([PROMPTS[1]], GREEDY)
    reference = tiny.copy_with_sdpa(tiny.make_target())
    assistant = tiny.make_assistant()
    assistant.generation_config.num_assistant_tokens = 3
    found = reference.generate(
        torch.tensor([PROMPTS[1]]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0,
        assistant_model=assistant,
    )  # fmt: skip
    assert completion.token_ids == found[0, len(PROMPTS[1]) :].tolist()
    assert completion.stats.num_drafted > 0


def test_a_loaded_assistant_drafts_in_transformers_generate() -> None:
    """As `assistant_model` of generate(), with the loop of the library."""
    target, loop = tiny.copy_with_sdpa(tiny.make_target(0)), foredraft.speculate()
    ids = torch.tensor([PROMPTS[1]])
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = target.generate(ids, **given)
    found = target.generate(ids, **given, assistant_model=tiny.make_assistant(), custom_generate=loop)
    assert found.tolist() == expected.tolist()
    [engine] = loop._llms[target].values()
    assert engine.drafter_name == "gemma4_assistant"
    assert engine.engine.drafter.num_failures == 0
    with pytest.raises(ForedraftError, match="the loaded LlamaForCausalLM is no head of the method gemma4_assistant"):
        LLM(target, {"method": "gemma4_assistant", "model": tiny_models.llama()})
