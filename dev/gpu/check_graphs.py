"""Passes by CUDA graphs against passes without, at every number of rows: padding must change nothing.

Usage: dev/gpu/run.sh [--dry] [FOLDER], which runs all parts.

Products of more rows may run by another algorithm of cuBLAS, so numbers may differ by a rounding. The bound is four
times the difference between the same rows in passes of 16 and of 64 rows without graphs. Experts run in float32: a
rounding of bfloat16 may choose another expert.
"""

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from report import Report
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from foredraft.kernels.gpu.graphs import CallingRecorder, CUDARecorder, GraphMemory, Recorder
from foredraft.kernels.gpu.loading import load_kernels
from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch, Span
from foredraft.models.hf import HFModel
from tests.support.gpu_cases import DEVICE

PAGE_SIZE, NUM_PAGES = 16, 600
CONTEXT = 300  # tokens of a request at most
BOUNDARIES = (1, AFTER_FINAL_NORM)
Check = tuple[bool, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One architecture."""

    name: str
    kind: type
    config: PretrainedConfig
    is_recordable: bool | None = True  # None = either is right
    dtype: torch.dtype = torch.bfloat16  # on a GPU

    def make_lms(self) -> tuple[HFModel, HFModel]:
        """Make the model without graphs and with them, over pools of their own."""
        torch.manual_seed(0)
        dtype = self.dtype if DEVICE == "cuda" else torch.float32
        model = self.kind(self.config).to(DEVICE, dtype).eval()
        recorder: Recorder = CUDARecorder(torch.device(DEVICE)) if DEVICE == "cuda" else CallingRecorder()
        lm = HFModel.wrap_model(model, self.name)
        pool = partial(KVPool, kernels=load_kernels(), is_whole=True, capacity=NUM_PAGES * PAGE_SIZE)
        return replace(lm, pool=pool()), replace(lm, pool=pool(recorder=recorder, graph_memory=GraphMemory(8 << 30)))


def make_config(kind: type, is_dry: bool, **sizes: Any) -> Any:
    """Make a configuration of two layers."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    return kind(
        **(small if is_dry else large), **sizes, vocab_size=97 if is_dry else 32000, num_hidden_layers=2,
        max_position_embeddings=1024, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def list_cases(is_dry: bool) -> list[Case]:
    head = {"head_dim": 8 if is_dry else 128}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    moe = make_config(Qwen3MoeConfig, is_dry, **head, **experts)
    return [
        Case("Llama", LlamaForCausalLM, make_config(LlamaConfig, is_dry)),
        Case("Qwen3", Qwen3ForCausalLM, make_config(Qwen3Config, is_dry, **head)),
        Case("Qwen3-MoE", Qwen3MoeForCausalLM, moe, None, torch.float32),
    ]


def make_spans(num_rows: int, random: Random) -> list[Span]:
    """Divide rows over requests of random contexts, chains and trees, on scattered pages."""
    num_requests = random.randint(1, min(num_rows, 8))
    cuts = sorted(random.sample(range(1, num_rows), num_requests - 1))
    free = random.sample(range(1, NUM_PAGES), NUM_PAGES - 1)
    spans = []
    for begin, end in zip([0, *cuts], [*cuts, num_rows], strict=True):
        size, start = end - begin, random.randrange(CONTEXT)
        parents = [-1, *(random.randrange(max(0, n - 4), n) for n in range(1, size))]
        depths = [0] * size
        for n in range(1, size):
            depths[n] = depths[parents[n]] + 1
        is_tree = random.random() < 0.5
        pages = [free.pop() for _ in range(-(-(start + size) // PAGE_SIZE))]
        tokens = [random.randrange(90) for _ in range(size)]
        spans.append(Span(pages, start, tokens, depths if is_tree else range(size), parents if is_tree else None))
    return spans


def fill_pools(lms: tuple[HFModel, HFModel]) -> None:
    """Allocate both pools, with equal numbers in all slots but those of the null page."""
    batch = ForwardBatch.from_spans([Span([1], 0, [1], range(1))], PAGE_SIZE, DEVICE)
    for lm in lms:
        lm.forward(batch)
        generator = torch.Generator(DEVICE).manual_seed(1)
        for pair in lm.pool.layers.values():
            for x in pair:
                x[PAGE_SIZE:].normal_(generator=generator)
                x[:PAGE_SIZE] = 0


def find_noise(lm: HFModel) -> float:
    """Return the difference of 16 rows alone and among 64, without graphs: what another product may round."""
    pages = list(range(1, 40))
    tokens = [Random(0).randrange(90) for _ in range(64)]
    passes = [
        lm.forward(ForwardBatch.from_spans([Span(pages, 200, tokens[:n], range(n))], PAGE_SIZE, DEVICE))[0][:16].float()
        for n in (16, 64)
    ]
    return (passes[0] - passes[1]).abs().max().item()


def check_size(lms: tuple[HFModel, HFModel], num_rows: int, bound: float) -> tuple[float, bool]:
    """Compare one pass. Returns the largest difference, and whether all bits are equal."""
    batch = ForwardBatch.from_spans(make_spans(num_rows, Random(num_rows)), PAGE_SIZE, DEVICE)
    found: list[tuple[Tensor, Tensor | None]] = [lm.forward(batch, BOUNDARIES) for lm in lms]
    (logits, states), (others, other_states) = found
    assert states is not None
    assert other_states is not None
    pairs = [(logits, others), (states, other_states)]
    for layer, pair in lms[0].pool.layers.items():
        pairs += zip(pair, lms[1].pool.layers[layer], strict=True)
        assert not lms[1].pool.layers[layer][0][:PAGE_SIZE].any(), "padding was written to the null page"
    difference = max((x.float() - y.float()).abs().max().item() for x, y in pairs)
    assert difference <= bound, f"{num_rows} rows differ by {difference:.2e}, above {bound:.2e}"
    return difference, all(torch.equal(x, y) for x, y in pairs)


def check_case(case: Case, max_rows: int) -> Check:
    lms = case.make_lms()
    bound = max(4 * find_noise(lms[0]), 1e-5)
    fill_pools(lms)
    results = [check_size(lms, num_rows, bound) for _ in range(2) for num_rows in range(1, max_rows + 1)]
    recorded = lms[1].recorded
    count = 0 if recorded._cache is None else len(recorded._cache)
    memory = lms[1].pool.graph_memory
    figures = {
        "sizes": max_rows, "graphs": count, "mib": 0 if memory is None else memory.used >> 20,
        "worst": f"{max(x for x, _ in results):.1e}", "bound": f"{bound:.1e}",
        "bit_equal": sum(is_equal for _, is_equal in results), "passes": len(results), "refused": recorded.reason,
    }  # fmt: skip
    return case.is_recordable is None or count > 0, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="small models in the interpreter, and calls for graphs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    options = parser.parse_args()
    report = Report(options.out)
    with torch.inference_mode():
        for case in list_cases(options.dry):
            report.run(f"{case.name}: passes by graphs", partial(check_case, case, 5 if options.dry else 64))
    raise SystemExit(report.num_failed > 0)


if __name__ == "__main__":
    main()
