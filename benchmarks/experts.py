"""Time of a forward pass of mixtures of experts: native code beside transformers' modules, and the limit by bytes.

    python benchmarks/experts.py [--threads 2] [--rounds 15] [--rows 1,4,8,16] [--layers 12]

Random bfloat16 models have the shapes of published ones, with fewer layers. All passes of a model take turns. `experts`
is the mean number of experts per layer that a pass reads. `of the bandwidth` is the share of the memory bandwidth,
measured between the passes, at which the pass reads what it needs: the weights of these experts and all others.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

from foredraft.engine.calibrate import spread_tokens
from foredraft.kernels.cpu.library import NativeLibrary, load_library
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import HFModel

VOCAB, PAGE_SIZE, CONTEXT = 32_768, 16, 64
READ_BYTES = 512 << 20
SHAPES: dict[str, Callable[[int], Any]] = {
    "granitemoe (1B-A400M)": lambda layers: hf.GraniteMoeConfig(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, num_local_experts=32, num_experts_per_tok=8,
    ),
    "olmoe (7B-A1B)": lambda layers: hf.OlmoeConfig(
        vocab_size=VOCAB, hidden_size=2048, intermediate_size=1024, num_hidden_layers=layers // 3,
        num_attention_heads=16, num_key_value_heads=16, num_experts=64, num_experts_per_tok=8,
    ),
    "qwen3_moe (30B-A3B)": lambda layers: hf.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=layers // 6, head_dim=128,
        num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
    ),
}  # fmt: skip


@dataclass
class PassTimes:
    """Seconds of the passes of one number of rows."""

    batch: ForwardBatch
    native: list[float]
    modules: list[float]


def build_batch(rows: int) -> ForwardBatch:
    pages = list(range(1, 2 + (CONTEXT + rows) // PAGE_SIZE))
    span = Span(pages, CONTEXT, spread_tokens(rows, VOCAB), range(rows))
    return ForwardBatch.build([span], range(rows), PAGE_SIZE, torch.device("cpu"))


def time_call(action: Callable[..., object], *arguments: Any) -> float:
    start = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - start


def count_experts(model: Any, lm: HFModel, batch: ForwardBatch) -> float:
    """Return the mean number of experts per layer that a pass of the modules reads."""
    chosen: list[int] = []

    def note(router: Any, inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        chosen.append(next(o for o in outputs if not o.is_floating_point()).unique().numel())

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    hooks = [router.register_forward_hook(note) for router in routers]
    lm.forward(batch)
    for hook in hooks:
        hook.remove()
    return statistics.mean(chosen)


def count_bytes(model: Any, num_experts: float) -> float:
    """Return the bytes of weights that a pass reads, of one row of embeddings none."""
    total = 0.0
    for name, weight in model.named_parameters():
        if "embed_tokens" in name and not model.config.tie_word_embeddings:
            continue
        share = num_experts / len(weight) if "experts." in name else 1.0
        total += weight.nbytes * share
    return total


@torch.inference_mode()
def measure(name: str, config: Any, rows: list[int], rounds: int, library: NativeLibrary) -> None:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    modules = HFModel.wrap_model(copy.copy(model), name, is_fused=False)
    native = HFModel.wrap_model(model, name, is_fused=True)
    assert native.fused is not None
    memory, reads = torch.zeros(READ_BYTES, dtype=torch.uint8), list[float]()
    passes = {count: PassTimes(build_batch(count), [], []) for count in rows}
    for number in range(rounds + 1):
        for each in passes.values():
            times = time_call(native.forward, each.batch), time_call(modules.forward, each.batch)
            read = time_call(library.handle.fd_read_memory, memory.data_ptr(), READ_BYTES)
            if number:  # the first round warms up
                each.native.append(times[0])
                each.modules.append(times[1])
                reads.append(read)
    bandwidth = READ_BYTES / statistics.median(reads)
    first = statistics.median(passes[rows[0]].native)
    for count, each in passes.items():
        experts = count_experts(model, modules, each.batch)
        seconds, slow = statistics.median(each.native), statistics.median(each.modules)
        share = count_bytes(model, experts) / seconds / bandwidth
        print(
            f"| {name}, {config.num_hidden_layers} layers | {count} | {experts:.1f} | {1e3 * seconds:.1f} | "
            f"{seconds / first:.2f} | {100 * share:.0f} % | {slow / seconds:.2f}x |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", default="1,4,8,16")
    parser.add_argument("--layers", type=int, default=12, help="of the smallest model (default: 12)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = load_library()
    assert library is not None
    library.sync_threads()
    print(f"{library.instruction_set}, {options.threads} threads\n")
    print("| model | rows | experts | ms | of one row | of the bandwidth | times faster than modules |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, shape in SHAPES.items():
        measure(name, shape(options.layers), [int(n) for n in options.rows.split(",")], options.rounds, library)


if __name__ == "__main__":
    main()
