"""Exact models: a row has the same bits in every pass, and what cannot be exact is refused with the reason.

Without a GPU the kernels run in triton's interpreter: passes on the CPU, whole engines on a pretended GPU.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft import LLM, Completion, ForedraftError, Sampling
from foredraft.cli.backend import load_llm
from foredraft.cli.bench_options import LatencyOptions
from foredraft.cli.options import ModelOptions
from foredraft.kernels.gpu.graphs import CallingRecorder, CUDARecorder, GraphMemory
from foredraft.kernels.gpu.loading import ExactKernels, load_exact_kernels, load_kernels
from foredraft.kv.pool import KVPool
from foredraft.llm import MemoryLimits
from foredraft.models.compatibility import probe_attention
from foredraft.models.exact_modules import EXACT_MODULES, ExactLayerNorm, ExactLinear, ExactRMSNorm, replace_modules
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import HFModel
from foredraft.models.row_independence import find_dependent_operator
from tests.support import tiny_models
from tests.support.families import FAMILIES, make_family
from tests.support.gpu_cases import DEVICE, PAGE_SIZE, TRITON, make_chain, make_tree, scatter_pages
from tests.support.library_setups import NATIVE
from tests.support.pretend_kernels import pretend_kernels

# One layer, for each launch takes the interpreter milliseconds. Widths are multiples of the vectors of the CPU, whose
# exponential function and cosine round the rest of a tensor otherwise.
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": 3,
}  # fmt: skip
CONFIGS = {"llama": hf.LlamaConfig, "qwen3": hf.Qwen3Config}
TOKENS = [(7 * i) % 53 + 4 for i in range(12)]
PROMPT = 10  # of these tokens
NUM_PAGES = 64
MATE = [(5 * i) % 47 + 9 for i in range(20)]


@cache
def make_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[family](**SIZES)).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight, 1, 0.3)
    return model.to(dtype)


def multiply_in_splits(x: Tensor, weight: Tensor, bias: Tensor | None = None, splits: int = 2) -> Tensor:
    """Multiply with short tiles, so that weights have splits: those with few outputs (keys, values and the head)."""
    from foredraft.kernels.gpu.product import ProductPlan, multiply

    plan = ProductPlan.make(*weight.shape, weight.element_size())
    splits = splits if len(weight) < SIZES["hidden_size"] else 1
    return multiply(x, weight, bias, replace(plan, splits=splits, inputs=16))


def wrap(model: Any, kernels: ExactKernels | None) -> HFModel:
    """Wrap a copy of a model with exact modules; None = its own modules. Attention runs on the Triton kernel."""
    model = copy.deepcopy(model).to(DEVICE)
    if kernels is not None:
        replace_modules(model, kernels)
    return replace(HFModel.wrap_model(model, "tiny"), pool=KVPool(kernels=load_kernels()))


@dataclass
class Sequences:
    """Requests of one model, each with its tokens so far on pages of its own."""

    lm: HFModel
    pages: list[list[int]]
    starts: list[int]

    @classmethod
    def make(cls, lm: HFModel, seed: int) -> "Sequences":
        lm.pool.clear()
        return cls(lm, scatter_pages([40, 40], seed), [0, 0])

    @torch.inference_mode()
    def run(self, spans: Sequence[Span]) -> list[Tensor]:
        """Run a pass; returns the logits of each span."""
        logits = self.lm.forward(ForwardBatch.from_spans(list(spans), PAGE_SIZE, DEVICE))[0]
        return list(logits.cpu().split([len(span.tokens) for span in spans]))

    def read(self, **chunks: Sequence[int]) -> Tensor:
        """Read the next tokens of the request, and of its batch mate; returns the logits of the request."""
        spans = []
        for index, name in enumerate(("own", "mate")):
            if name in chunks:
                span = make_chain(self.pages[index], self.starts[index], len(chunks[name]))
                spans.append(span._replace(tokens=list(chunks[name])))
                self.starts[index] += len(chunks[name])
        return self.run(spans)[0]


def decode(lm: HFModel) -> Tensor:
    """Read the prompt in one pass and the other tokens one by one, as plain decoding does."""
    sequences = Sequences.make(lm, 1)
    rows = [sequences.read(own=TOKENS[:PROMPT])]
    rows += [sequences.read(own=[token]) for token in TOKENS[PROMPT:]]
    return torch.cat(rows)


@pytest.fixture(scope="module", params=CONFIGS)
def exact(request: pytest.FixtureRequest) -> tuple[HFModel, Tensor]:
    """Make an exact model, and the logits of plain decoding."""
    lm = wrap(make_model(request.param), replace(load_exact_kernels(), multiply=multiply_in_splits))
    return lm, decode(lm)


@TRITON
def test_chunks_and_batch_mates_change_no_bit(exact: tuple[HFModel, Tensor]) -> None:
    """So does a prompt that is computed again in one piece after a preemption."""
    lm, plain = exact
    sequences = Sequences.make(lm, 2)
    rows = [sequences.read(own=TOKENS[:3], mate=MATE), sequences.read(own=TOKENS[3:])]
    assert torch.equal(torch.cat(rows), plain)


@TRITON
def test_recorded_passes_change_no_bit(exact: tuple[HFModel, Tensor]) -> None:
    """Rows of padding join the pass of a recording."""
    eager, plain = exact
    pool = KVPool(
        kernels=load_kernels(),
        is_whole=True,
        capacity=NUM_PAGES * PAGE_SIZE,
        recorder=CallingRecorder() if DEVICE == "cpu" else CUDARecorder(torch.device(DEVICE)),
        graph_memory=GraphMemory(1 << 30),
    )
    lm = replace(eager, pool=pool)
    sequences = Sequences.make(lm, 4)
    rows = [sequences.read(own=TOKENS[:3], mate=MATE), sequences.read(own=TOKENS[3:])]
    assert torch.equal(torch.cat(rows), plain)
    assert lm.recorded.reason is None
    assert lm.recorded._cache is not None


@TRITON
def test_rows_of_a_tree_have_the_bits_of_plain_decoding(exact: tuple[HFModel, Tensor]) -> None:
    lm, plain = exact
    sequences = Sequences.make(lm, 3)
    sequences.read(own=TOKENS[:PROMPT], mate=MATE[:2])
    # nodes 0 and 2 are the true tokens
    tree = make_tree(sequences.pages[0], PROMPT, (-1, 0, 0, 1, 2))
    tree = tree._replace(tokens=[TOKENS[PROMPT], 50, TOKENS[PROMPT + 1], 51, 52])
    mate = make_chain(sequences.pages[1], 2, 3)._replace(tokens=MATE[2:5])
    rows = sequences.run([mate, tree])[1]
    assert torch.equal(rows[[0, 2]], plain[PROMPT:])
    assert not torch.equal(rows[1], plain[PROMPT + 1])


@TRITON
@pytest.mark.parametrize("fault", ["splits by rows", "the product of torch"])
def test_the_check_sees_products_that_depend_on_the_rows(fault: str) -> None:
    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return multiply_in_splits(x, weight, bias, 2 if x[..., 0].numel() > 1 else 1)

    faulty = F.linear if fault == "the product of torch" else multiply
    lm = wrap(make_model("llama"), replace(load_exact_kernels(), multiply=faulty))
    together, alone = (Sequences.make(lm, 2).read(own=TOKENS[:count]) for count in (len(TOKENS), 1))
    assert not torch.equal(alone, together[:1])


# The fast one has transposed weights and layer norms.
EXACT_FAMILIES = sorted(set(FAMILIES) - {"qwen3_moe", "mixtral", "gpt_oss", "cohere"})
FAST_FAMILIES = ("gpt2",)


@TRITON
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in FAST_FAMILIES else pytest.mark.soak) for name in EXACT_FAMILIES]
)
def test_logits_of_every_family_are_those_of_torch(family: str) -> None:
    model = make_family(family)[1].model
    ours = wrap(model, load_exact_kernels())
    theirs = replace(wrap(model, None), pool=KVPool())
    assert find_dependent_operator(ours.model, EXACT_MODULES, probe_attention) is None
    assert find_dependent_operator(theirs.model, EXACT_MODULES, probe_attention) is not None
    with torch.inference_mode():  # operators arrive undivided
        assert find_dependent_operator(ours.model, EXACT_MODULES, probe_attention) is None
        assert find_dependent_operator(theirs.model, EXACT_MODULES, probe_attention) is not None
    rows = [Sequences.make(lm, 1).read(own=TOKENS[:5]) for lm in (ours, theirs)]
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=2e-5)


@TRITON
@torch.no_grad()
def test_norms_are_recognised_by_what_they_compute() -> None:
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

    class Halved(Gemma2RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 0.5

    norms = nn.ModuleList(
        [CohereLayerNorm(64), Gemma2RMSNorm(64), GptOssRMSNorm(64), nn.LayerNorm(64, bias=False), nn.Linear(64, 64),
         CohereLayerNorm((2, 64)), nn.RMSNorm(64), Halved(64)]
    ).to(DEVICE, torch.float16)  # fmt: skip
    for parameter in norms.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    expected = [module(x) for module in norms[:5]]
    replace_modules(norms, load_exact_kernels())
    kinds = [ExactLayerNorm, ExactRMSNorm, ExactRMSNorm, ExactLayerNorm, ExactLinear]
    assert [type(module) for module in norms[:5]] == kinds
    for module, out in zip(norms[:5], expected, strict=True):
        # a norm that rounds before it multiplies, and not after, has other numbers in every fourth place
        assert (module(x) != out).double().mean() < 0.05, type(module)
    assert not any(isinstance(module, EXACT_MODULES) for module in norms[5:]), "norms of another kind must stay"
    with pytest.raises(TypeError):
        norms[1](x, x)


def use_gpu() -> AbstractContextManager[None]:
    return nullcontext() if torch.cuda.is_available() else pretend_kernels(multiply=multiply_in_splits)


def list_results(done: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(one.token_ids, one.logprobs) for one in done]


@TRITON
def test_drafts_change_no_bit_of_the_output() -> None:
    """With all that belongs to a load: modules, attention and moves, on the device of a GPU."""
    sampling = Sampling(max_tokens=4, temperature=0, ignore_eos=True, logprobs=2)
    prompts = [[5, 6, 7, 5, 6]]
    with use_gpu():
        device = torch.device("cuda:0")
        model = copy.deepcopy(make_model("llama")).to(device)
        plain = LLM(model, None, exact=True, is_debug=True)
        assert plain.target.is_exact
        assert type(model.lm_head) is nn.Linear, "the model of the caller was changed"
        assert plain.target.model.lm_head.weight is model.lm_head.weight, "the weights were copied"
        alone = [list_results(plain.generate([prompt], sampling))[0] for prompt in prompts]
        # a draft in float64 runs on torch's operators, which are faster than the interpreter
        drafter = tiny_models.draft_model(2, (2, 1), make_model("llama", torch.float64), device=device)
        done = plain.with_drafter(drafter, verify="match").generate(prompts, sampling)
        assert list_results(done) == alone
        assert 0 < sum(one.stats.num_accepted for one in done) < sum(one.stats.num_drafted for one in done)
        assert LLM(plain.target, None, exact=True).target.is_exact


@TRITON
@pytest.mark.soak
@pytest.mark.parametrize(("temperature", "dtype"), [(0.0, torch.bfloat16), (0.7, torch.float32)])
def test_preemption_changes_no_bit(temperature: float, dtype: torch.dtype) -> None:
    sampling = Sampling(max_tokens=12, temperature=temperature, seed=5, ignore_eos=True, logprobs=2)
    prompts = [TOKENS, [40], MATE, TOKENS[3:9]]
    with use_gpu():
        device = torch.device("cuda:0")
        plain = LLM(copy.deepcopy(make_model("qwen3", dtype)).to(device), None, exact=True, is_debug=True)
        alone = [list_results(plain.generate([prompt], sampling))[0] for prompt in prompts]
        drafter = tiny_models.draft_model(3, None, make_model("qwen3", torch.float64), device=device)
        limits = MemoryLimits(kv_tokens=44, page_size=4, max_batch=4, max_step_tokens=24)
        llm = tiny_models.limit_memory(plain, drafter, limits, max_chunk=5)
        assert list_results(llm.generate(prompts, sampling)) == alone
        assert llm.engine.scheduler.num_preempted > 0


# Refusals and the CPU


@NATIVE
def test_native_code_on_the_cpu_is_exact() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        llm = LLM(tiny_models.llama(hidden=64).to(dtype), None, exact=True)
        assert llm.target.runs_native
        assert llm.target.is_exact
    assert not tiny_models.plain().target.is_exact
    assert LLM(exact=True, drafter=None, quantization="int8", device="cpu").target.is_exact


def make_quantised() -> Any:
    model = copy.deepcopy(make_model("llama"))
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "transformers' modules on the CPU": (
        lambda: copy.deepcopy(make_model("llama")), {"fused": False}, "fused=False (--no-fused) switches it off"
    ),
    "a family without native code": (
        lambda: copy.deepcopy(make_family("gpt2")[0]), {}, "does not run as native code (models of type gpt2)"
    ),
    "a wrapped model": (lambda: tiny_models.plain().target, {}, "was loaded without exact=True"),
    "no truth value": (lambda: make_model("llama"), {"exact": 1}, "exact is True or False, got 1"),
    "several processes": (lambda: "builtin", {"tensor_parallel_size": 2}, "leave exact or tensor_parallel_size out"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exact_is_refused_with_the_reason(case: str) -> None:
    make, options, reason = REFUSED[case]
    with pytest.raises(ForedraftError) as error:
        LLM(make(), None, **{"exact": True, **options})
    assert reason in str(error.value)


@NATIVE
def test_the_option_of_the_commands_reaches_the_model() -> None:
    options = ModelOptions(exact=True, device="cpu")
    assert load_llm(options, "none").target.is_exact
    with pytest.raises(ForedraftError, match="switches it off"):
        load_llm(replace(options, no_fused=True), "none")
    assert LatencyOptions(exact=True).llm_options == {"exact": True}


SLOW = ("norms per head",)
GPU_REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "experts": (lambda: make_family("mixtral")[0], "model.layers.0.mlp.gate (MixtralTopKRouter) computes mm"),
    "norms per head": (lambda: make_family("cohere")[0], "q_norm (CohereLayerNorm) computes mean"),
    "float64": (lambda: make_model("llama", torch.float64), "its weights are torch.float64"),
    "a quantised checkpoint": (make_quantised, "its checkpoint is quantised"),
    "wide heads": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES | {"head_dim": 288})), "a head size of 288 is above 256"
    ),
}  # fmt: skip


@TRITON
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.soak if name in SLOW else []) for name in GPU_REFUSED]
)
def test_what_is_not_exact_on_a_gpu_is_refused_with_the_reason(case: str) -> None:
    make, reason = GPU_REFUSED[case]
    with use_gpu():
        model = copy.deepcopy(make()).to(torch.device("cuda:0"))
        with pytest.raises(ForedraftError) as error:
            LLM(model, None, exact=True)
    assert reason in str(error.value)
    assert "leave exact (--exact) out" in str(error.value)
