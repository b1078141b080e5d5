"""Quantised loading: every family, every path, and what it costs in quality.

Guards against matrices that were missed, a caller's model changed under its feet, a path that quantises otherwise than
the others, speculation that changes quantised text, and a rounding rule that loses more than it should.
"""

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from foredraft import LLM, Sampling, zoo
from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import KERNELS_VARIABLE
from foredraft.kernels.linear import PANEL
from foredraft.kernels.quantize import INT4, INT8, multiply
from foredraft.models.hf import HFModel
from foredraft.models.packed_linear import PackedLinear, check_quantizable, pack_linears
from foredraft.zoo import corpus
from tests.support.families import FAMILIES, PagedModel, compute_reference, make_family, tokens
from tests.support.library_setups import NATIVE

PROMPT = "def parse(self, text):\n"
GREEDY = Sampling(max_tokens=40, temperature=0.0)


def large(model: Any) -> list[str]:
    linears = [(name, m) for name, m in model.named_modules() if type(m) in (nn.Linear, Conv1D)]
    return [name for name, m in linears if min(m.weight.shape) >= PANEL]


@NATIVE
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_quantised_and_the_callers_model_stays_as_it_was(family: str) -> None:
    model, _ = make_family(family)
    ids, given = tokens(40), copy.deepcopy(model)
    lm = HFModel.wrap_model(given, family, quantization="int8")
    logits, expected = PagedModel(lm).read({0: ids}), compute_reference(model, ids)
    assert large(lm.model) == []
    assert large(given) == large(model)
    given_to = {id(p) for p in given.parameters()}
    assert all(id(p) in given_to for p in lm.model.parameters())
    assert lm.vocab_size == expected.shape[1]
    assert lm.num_parameters == sum(p.numel() for p in model.parameters())
    likeness = F.cosine_similarity(logits.flatten(), expected.flatten(), dim=0)
    assert likeness > 0.98, likeness


def test_the_head_has_eight_bits_and_small_matrices_stay() -> None:
    model, _ = make_family("qwen3_moe")
    found = pack_linears(model, "int4", is_owned=False)
    kinds = {name: m.packed.kind for name, m in found.named_modules() if isinstance(m, PackedLinear)}
    assert kinds.pop("lm_head") == INT8
    assert kinds
    assert set(kinds.values()) == {INT4}
    assert not any("gate" in name.rpartition(".")[2] and "proj" not in name for name in kinds)


@NATIVE
@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_a_module_gives_the_bits_of_the_slow_product_with_its_own_weight(family: str) -> None:
    """gpt2 keeps its matrices transposed."""
    model, _ = make_family(family)
    found = pack_linears(model, "int8", is_owned=False)
    for name in large(model):
        was, now = model.get_submodule(name), found.get_submodule(name)
        weight = was.weight if type(was) is nn.Linear else was.weight.T
        x = torch.randn(2, 3, weight.shape[1], generator=torch.Generator().manual_seed(0))
        assert torch.equal(now(x).flatten(0, 1), multiply(x.flatten(0, 1), now.packed))
        torch.testing.assert_close(now(x), was(x), rtol=0, atol=0.03 * float(was(x).detach().abs().max()))
        assert now.weight.shape == weight.shape


def builtin(**options: Any) -> LLM:
    return LLM(**{"drafter": None, "dtype": "float32", **options})


@NATIVE
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_speculation_does_not_change_quantised_text(quantization: str) -> None:
    plain = builtin(quantization=quantization)
    seeded = Sampling(max_tokens=40, temperature=1.0, seed=5)
    expected = [plain.generate(PROMPT, s)[0].token_ids for s in (GREEDY, seeded)]
    for draft in (None, "int8", "int4"):
        method = {"method": "draft_model", "num_speculative_tokens": 4, "quantization": draft}
        llm = plain.with_drafter(method)
        found = [llm.generate(PROMPT, s)[0] for s in (GREEDY, seeded)]
        assert [f.token_ids for f in found] == expected
        assert found[0].stats.acceptance_length > 1.3


@NATIVE
def test_the_paths_agree_on_quantised_text() -> None:
    """The paths are fused, module by module, and without native kernels; the last one warns once."""
    fused, modules = (builtin(quantization="int8", fused=f).generate(PROMPT, GREEDY)[0].text for f in (True, False))
    assert fused == modules
    code = (
        "from foredraft import LLM, Sampling; import torch; torch.set_num_threads(1)\n"
        "llm = LLM(drafter=None, dtype='float32', quantization='int8')\n"
        f"print(llm.generate({PROMPT!r}, Sampling(max_tokens=10, temperature=0.0))[0].text, end='')"
    )
    slow = subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, KERNELS_VARIABLE: "torch"},
        check=True,
    )
    assert fused.startswith(slow.stdout)
    assert slow.stdout
    assert slow.stderr.count("without the native kernels") == 1


@pytest.mark.parametrize("name", ["int3", "awq", ""])
def test_an_unknown_quantization_is_refused_before_anything_is_loaded(name: str) -> None:
    message = f"unknown quantization '{name}'; use int8 or int4"
    with pytest.raises(ForedraftError, match=message):
        LLM("/no/such/folder", quantization=name)
    with pytest.raises(ForedraftError, match=message):
        LLM(drafter={"method": "draft_model", "quantization": name})
    with pytest.raises(ForedraftError, match="there is no quantization here: this method rounds no weights"):
        LLM(drafter={"method": "ngram", "quantization": "int8"})


def read_held_out(windows: int, length: int) -> Tensor:
    """Return [W, L + 1] ids of held-out text."""
    tokenizer = AutoTokenizer.from_pretrained(zoo.find_folder("target"))
    ids = tokenizer("\n".join(corpus.make_held_out_prompts(2 * windows))).input_ids
    return torch.tensor(ids[: windows * (length + 1)]).view(windows, length + 1)


@NATIVE
@torch.inference_mode()
def test_what_quantisation_costs_in_quality() -> None:
    """The unit is nats per token of held-out text; the bounds are a little above the measured values."""
    model = AutoModelForCausalLM.from_pretrained(zoo.find_folder("target"), dtype=torch.float32).eval()
    ids = read_held_out(16, 160)
    log_probs_of = {None: model(ids[:, :-1], use_cache=False).logits.log_softmax(-1)}
    for name in ("int8", "int4"):
        log_probs_of[name] = pack_linears(model, name, is_owned=False)(ids[:, :-1], use_cache=False).logits.log_softmax(
            -1
        )
    loss = {
        name: F.nll_loss(log_probs.flatten(0, 1), ids[:, 1:].flatten()).item()
        for name, log_probs in log_probs_of.items()
    }
    away = {
        name: (log_probs_of[None].exp() * (log_probs_of[None] - log_probs)).sum(-1).mean().item()
        for name, log_probs in log_probs_of.items()
    }
    assert away["int8"] < 0.0006
    assert away["int4"] < 0.03
    assert loss["int8"] - loss[None] < 0.004
    assert loss["int4"] - loss[None] < 0.03


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_gpu_refuses_the_rounding_and_names_what_works(name: str) -> None:
    with pytest.raises(ForedraftError, match=rf"'{name}' .* is on meta; load a checkpoint .*FP8, AWQ or GPTQ"):
        check_quantizable(nn.Linear(2, 2, device="meta").weight, name)
    check_quantizable(nn.Linear(2, 2, device="meta").weight, None)
