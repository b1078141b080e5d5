"""Parts (e) and (f): passes and steps of a whole model with random weights, beside transformers' own generation.

Usage: dev/gpu/run.sh [--dry] [FOLDER], which runs all parts.

`pass` is the target's forward pass over a context, by its number of rows: a verification of n rows should take little
more than a pass of one. `with fused norms` is the same pass of a model that Foredraft has loaded itself, and `exact`
that of an exact model; `over_ordinary` compares them. Tokens of an exact model must be the same with drafts, in
bfloat16 too. `kernels` are those with the largest times in a pass of one row. `generate` is the engine, plain and with
drafts of which 80 % are accepted; the difference between its seconds per step and those of the pass is the work of the
host. The text is meaningless, the times are not.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import Report
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM

from foredraft import LLM, Sampling
from foredraft.kernels.gpu.graphs import GraphMemory
from foredraft.kernels.gpu.loading import load_exact_kernels, load_kernels
from foredraft.kv.pool import KVPool
from foredraft.models.exact_modules import replace_modules
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import HFModel
from tests.support.gpu_cases import DEVICE

PAGE_SIZE = 16
CHUNK = 1024  # prompt tokens per pass
REPEATS, WARMUP = (10, 3) if DEVICE == "cuda" else (1, 1)
CHAIN, RATE = 8, 0.8  # tokens of a draft; share of them that is accepted
GRAPH_BYTES = 2 << 30  # as an engine
NUM_KERNELS = 14  # of the list of kernels
NUM_CHILDREN = 3  # of each node in the tree of the passes


@dataclass(frozen=True)
class Case:
    """One architecture, the contexts and the rows of its passes."""

    name: str
    config: PretrainedConfig
    contexts: tuple[int, ...] = (1 << 10, 1 << 15)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    num_tokens: int = 128  # of a generation
    prompt: int = 256

    def make_model(self) -> Any:
        """Make the model on the device, in bfloat16; in float32 on a CPU."""
        kind = LlamaForCausalLM if isinstance(self.config, LlamaConfig) else Qwen3ForCausalLM
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(DEVICE):
                return kind(self.config).eval()
        finally:
            torch.set_default_dtype(default)


LLAMA_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=1 << 16, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
QWEN3_8B = Qwen3Config(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=1 << 16, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CASES = [Case("Llama-3-8B", LLAMA_8B), Case("Qwen3-8B", QWEN3_8B)]
DRY_CASES = [
    Case("small Llama", LlamaConfig(**SMALL), (40,), (1, 4), 12, 16),
    Case("small Qwen3", Qwen3Config(**SMALL, head_dim=8), (40,), (1, 4), 12, 16),
]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure_seconds(run: Callable[[], object], repeats: int) -> float:
    """Measure the median time of a call, until the device has finished."""
    times = []
    for _ in range(repeats + WARMUP):
        synchronize()
        began = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times[WARMUP:])[repeats // 2]


def make_parents(rows: int, is_tree: bool) -> list[int] | None:
    """Make the parents of a tree; None = a chain."""
    return [-1, *((node - 1) // NUM_CHILDREN for node in range(1, rows))] if is_tree and rows > 1 else None


def make_batch(context: int, rows: int, pages: list[int], is_tree: bool) -> ForwardBatch:
    """Make a pass of `rows` nodes after a context. All rows have logits."""
    parents = make_parents(rows, is_tree)
    depths = list(range(rows))
    if parents is not None:
        depths = [0] * rows
        for node in range(1, rows):
            depths[node] = depths[parents[node]] + 1
    span = Span(pages, context, [7] * rows, depths, parents)
    return ForwardBatch.from_spans([span], PAGE_SIZE, DEVICE)


def run_pass(lm: HFModel, context: int, rows: int, pages: list[int], is_tree: bool) -> None:
    """Run a pass with a new batch, as the engine does: the tensors of a batch are built on first access."""
    lm.forward(make_batch(context, rows, pages, is_tree))


def make_exact(model: Any, name: str) -> HFModel:
    """Wrap a model as an exact one. Without a GPU its modules run in triton's interpreter on the CPU."""
    if DEVICE == "cuda":
        return HFModel.wrap_model(model, name, is_exact=True)
    model = copy.deepcopy(model)
    replace_modules(model, load_exact_kernels())
    return replace(HFModel.wrap_model(model, name), pool=KVPool(kernels=load_kernels()), has_exact_modules=True)


PassTimes = dict[tuple[int, int, bool], float]  # seconds by context, rows and whether they are a tree


def allow_recordings(lm: HFModel, case: Case) -> HFModel:
    """Let passes be recorded as in an engine: over a whole pool, with memory for the recordings."""
    lm.pool.capacity = max(case.contexts) + 2 * CHUNK
    lm.pool.graph_memory = GraphMemory(GRAPH_BYTES)
    return lm


def measure_passes(
    case: Case, lm: HFModel, report: Report, ordinary: PassTimes | None = None, kind: str = "exact"
) -> PassTimes:
    """Measure passes by context and rows, as multiples of the pass of one row, and of those of an ordinary model."""
    title = case.name if ordinary is None else f"{case.name} {kind}"
    times: PassTimes = {}
    for context in case.contexts:
        pages = list(range(1, -(-(context + 64) // PAGE_SIZE) + 1))
        lm.pool.clear()
        for start in range(0, context, CHUNK):
            count = min(CHUNK, context - start)
            chunk = Span(pages, start, [5] * count, range(count))
            lm.forward(ForwardBatch.from_spans([chunk], PAGE_SIZE, DEVICE, last_only=True))
        one = 0.0
        for rows, is_tree in [(rows, False) for rows in case.rows] + [(case.rows[-1], True)]:
            seconds = measure_seconds(partial(run_pass, lm, context, rows, pages, is_tree), REPEATS)
            one = one or seconds
            shape = "tree" if is_tree else "chain"
            name = f"{title}: pass of {rows} rows, a {shape}, over {context} tokens"
            key = context, rows, is_tree
            times[key] = seconds
            cost = {} if ordinary is None else {"over_ordinary": round(seconds / ordinary[key], 3)}
            report.add(name, None, ms=round(seconds * 1e3, 3), ratio=round(seconds / one, 3), **cost)
    return times


def list_kernels(case: Case, lm: HFModel, report: Report) -> None:
    """List the kernels of a pass of one row that take most of the device time."""
    if DEVICE != "cuda":
        return
    pages = list(range(1, case.contexts[0] // PAGE_SIZE + 8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_pass(lm, case.contexts[0], 1, pages, is_tree=False)
        synchronize()
    found = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in found)
    report.add(f"{case.name}: kernels of a pass", None, us=round(total), count=sum(event.count for event in found))
    for event in found[:NUM_KERNELS]:
        report.add(f"  {event.key[:60]}", None, us=round(event.self_device_time_total), count=event.count)


def generate(llm: LLM, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
    """Generate greedily. Returns the tokens and the seconds per token."""
    sampling = Sampling(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    llm.generate([prompt], Sampling(max_tokens=4, temperature=0, ignore_eos=True))  # warm up
    synchronize()
    began = time.perf_counter()
    (done,) = llm.generate([prompt], sampling)
    return done.token_ids, (time.perf_counter() - began) / num_tokens


def measure_engine(case: Case, model: Any, report: Report) -> None:
    """Measure the engine, plain, with chains from the prompt, and with simulated chains."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(5, 90, (case.prompt,), generator=generator).tolist()
    plain = LLM(model, None)
    tokens, seconds = generate(plain, prompt, case.num_tokens)
    report.add(f"{case.name}: plain decoding", None, ms_per_token=round(seconds * 1e3, 3))
    looking = plain.with_drafter("ngram", num_speculative_tokens=CHAIN)
    others, with_drafts = generate(looking, prompt, case.num_tokens)
    is_right = others == tokens if DEVICE == "cpu" else None  # in bfloat16 rows of other passes may differ by an ulp
    same = next((i for i, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1]), len(tokens))
    report.add(
        f"{case.name}: n-gram drafts of {CHAIN}", is_right, ms_per_token=round(with_drafts * 1e3, 3), same_tokens=same
    )
    spec = {"method": "foredraft.simulation:METHOD", "acceptance_rate": RATE, "num_speculative_tokens": CHAIN}
    simulated = LLM(model, spec)
    _, in_simulation = generate(simulated, prompt, case.num_tokens)
    report.add(
        f"{case.name}: simulated drafts of {CHAIN}, {RATE:.0%} accepted", None,
        ms_per_token=round(in_simulation * 1e3, 3), speed_up=round(seconds / in_simulation, 2),
    )  # fmt: skip
    measure_transformers(case, model, prompt, report)


def measure_exact(case: Case, lm: HFModel, report: Report) -> None:
    """Measure the engine with an exact model, and compare the tokens with those of plain decoding."""
    prompt = torch.randint(5, 90, (case.prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    plain = LLM(lm, None, exact=True)
    tokens, seconds = generate(plain, prompt, case.num_tokens)
    report.add(f"{case.name} exact: plain decoding", None, ms_per_token=round(seconds * 1e3, 3))
    looking = plain.with_drafter("ngram", num_speculative_tokens=CHAIN)
    others, with_drafts = generate(looking, prompt, case.num_tokens)
    name = f"{case.name} exact: n-gram drafts of {CHAIN}"
    report.add(name, others == tokens, ms_per_token=round(with_drafts * 1e3, 3))


def measure_transformers(case: Case, model: Any, prompt: list[int], report: Report) -> None:
    """Measure transformers' own generate, plain and with prompt lookup."""
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt], device=DEVICE)
    for name, options in {"generate": {}, "generate, prompt lookup": {"prompt_lookup_num_tokens": CHAIN}}.items():
        run = partial(
            model.generate, ids, do_sample=False, max_new_tokens=case.num_tokens, min_new_tokens=case.num_tokens,
            attention_mask=torch.ones_like(ids), pad_token_id=0, **options,
        )  # fmt: skip
        seconds = measure_seconds(run, 1)
        report.add(f"{case.name}: transformers' {name}", None, ms_per_token=round(seconds * 1e3 / case.num_tokens, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="small models on the CPU; the times mean nothing")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    options = parser.parse_args()
    report = Report(options.out)
    torch.manual_seed(0)
    with torch.inference_mode():
        for case in DRY_CASES if options.dry else CASES:
            model = case.make_model()
            num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
            report.add(f"{case.name}: weights", None, gb=round(num_bytes / 1e9, 2))
            lm = allow_recordings(HFModel.wrap_model(model, case.name), case)
            times = measure_passes(case, lm, report)
            list_kernels(case, lm, report)
            fused = allow_recordings(HFModel.wrap_model(model, case.name, is_fused=True), case)
            measure_passes(case, fused, report, times, "with fused norms")
            list_kernels(case, fused, report)
            del lm, fused
            if not options.dry or case is DRY_CASES[-1]:  # the interpreter is slow
                exact = allow_recordings(make_exact(model, case.name), case)
                measure_passes(case, exact, report, times)
                measure_exact(case, exact, report)
                del exact
            measure_engine(case, model, report)
            del model
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
    raise SystemExit(report.num_failed > 0)


if __name__ == "__main__":
    main()
