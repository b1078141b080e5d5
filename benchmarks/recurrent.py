"""Time of the passes of hybrid models: one native call, native recurrences in modules, and torch's operators.

    python -m benchmarks.recurrent [--threads 2] [--rounds 7] [--models qwen3_5] [--share 1]

Random bfloat16 models have the shapes of published ones with a small vocabulary, and `--share` of their layers. All of
them read packed weights by native products. The paths: `torch`: modules with recurrences, norms and attention by
torch's operators. `modules`: modules with native recurrences and attention. `native`: one call per pass. `limit`: the
longer of the times to read the weights and to multiply; states and recurrences are left out. The paths take
turns in every round. A pass over 8 rows verifies a chain or a tree; a prompt is a chunk of its own.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as hf

from foredraft.bench.pass_limits import LimitsMeter
from foredraft.engine.calibrate import spread_tokens
from foredraft.kernels.cpu.library import load_library
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import HFModel
from foredraft.models.packed_linear import pack_linears

VOCAB, PAGE_SIZE, CONTEXT, PROMPT, OUTPUT = 32_768, 16, 64, 256, 12
PAGES = list(range(1, 2 + (CONTEXT + PROMPT) // PAGE_SIZE))
TREE = (-1, 0, 0, 0, 1, 1, 2, 4)  # parents
PERIOD = ["linear_attention"] * 3 + ["full_attention"]


def choose_layers(period: Sequence[str], num_layers: int, share: float) -> list[str]:
    count = max(len(period), round(num_layers * share / len(period)) * len(period))
    return [*period] * (count // len(period))


def configure_qwen(share: float) -> Any:
    layers = choose_layers(PERIOD, 24, share)
    return hf.Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=3584, num_hidden_layers=len(layers), layer_types=layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
        tie_word_embeddings=True,
    )  # fmt: skip


def configure_granite(share: float) -> Any:
    layers = choose_layers(["linear_attention"] * 9 + ["full_attention"], 40, share)
    return hf.GraniteMoeHybridConfig(
        vocab_size=VOCAB, hidden_size=1536, shared_intermediate_size=4096, num_hidden_layers=len(layers),
        layer_types=layers, num_attention_heads=12, num_key_value_heads=4, num_local_experts=0, mamba_n_heads=48,
        mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, tie_word_embeddings=True,
    )  # fmt: skip


def configure_lfm(share: float) -> Any:
    layers = choose_layers(["conv", "conv", "full_attention"], 16, share)
    return hf.Lfm2Config(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=6656, num_hidden_layers=len(layers), layer_types=layers,
        num_attention_heads=16, num_key_value_heads=8,
    )  # fmt: skip


MODELS: dict[str, Callable[[float], Any]] = {
    "qwen3_5": configure_qwen,
    "granite4_h": configure_granite,
    "lfm2": configure_lfm,
}


def build_pass(start: int, tokens: Sequence[int], parents: Sequence[int] | None = None) -> ForwardBatch:
    """Build a pass over draft nodes."""
    depths = [0]
    for parent in (parents or range(-1, len(tokens) - 1))[1:]:
        depths.append(depths[parent] + 1)
    span = Span(PAGES, start, list(tokens), depths, None if parents is None else list(parents))
    return ForwardBatch.build([span], range(len(tokens)), PAGE_SIZE, "cpu")


def build_chunk(count: int) -> ForwardBatch:
    """Build a pass over a prompt."""
    span = Span(PAGES, 0, spread_tokens(count, VOCAB), range(count), num_settled=count - 1)
    return ForwardBatch.build([span], [count - 1], PAGE_SIZE, "cpu")


def decode(lm: HFModel) -> None:
    """Decode greedily, by passes over one token."""
    token = 5
    for position in range(CONTEXT, CONTEXT + OUTPUT):
        logits, _ = lm.forward(build_pass(position, [token]))
        token = int(logits[0].argmax())


def wrap_paths(config: Any, name: str) -> dict[str, HFModel]:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    native = HFModel.wrap_model(copy.copy(model), name, is_fused=True)
    assert native.fused is not None, name
    packed = pack_linears(model, None, is_owned=False)
    modules = HFModel.wrap_model(packed, name, is_fused=True)
    assert modules.fused is None, name
    return {"torch": HFModel.wrap_model(packed, name, is_fused=False), "modules": modules, "native": native}


@torch.inference_mode()
def measure(name: str, config: Any, rounds: int) -> None:
    paths = wrap_paths(config, name)
    tokens = spread_tokens(len(TREE), VOCAB)
    works: dict[str, Callable[[HFModel], object]] = {
        "prompt": lambda lm: lm.forward(build_chunk(PROMPT)),
        "context": lambda lm: lm.forward(build_chunk(CONTEXT)),
        "decode": decode,
        "one": lambda lm: lm.forward(build_pass(CONTEXT, tokens[:1])),
        "chain": lambda lm: lm.forward(build_pass(CONTEXT, tokens)),
        "tree": lambda lm: lm.forward(build_pass(CONTEXT, tokens, TREE)),
    }
    times = {path: {work: list[float]() for work in works} for path in paths}
    meter = LimitsMeter(paths["native"])
    for number in range(rounds + 1):
        meter.measure()
        for work, run in works.items():
            for path, lm in paths.items():
                start = time.perf_counter()
                run(lm)
                if number:  # the first round warms up
                    times[path][work].append(time.perf_counter() - start)
    medians = {path: {work: statistics.median(found) for work, found in each.items()} for path, each in times.items()}
    for path, found in medians.items():
        one, slow = found["one"], medians["torch"]
        print(
            f"| {name}, {config.num_hidden_layers} layers | {path} | {OUTPUT / found['decode']:.1f} | "
            f"{1e3 * one:.1f} | {1e3 * found['chain']:.1f} | {1e3 * found['tree']:.1f} | {found['chain'] / one:.2f} | "
            f"{found['tree'] / one:.2f} | {1e3 * found['prompt']:.0f} | {slow['decode'] / found['decode']:.2f}x | "
            f"{slow['chain'] / found['chain']:.2f}x | {slow['tree'] / found['tree']:.2f}x | "
            f"{slow['prompt'] / found['prompt']:.2f}x |",
            flush=True,
        )
    print(format_limits(name, config, meter), flush=True)


def format_limits(name: str, config: Any, meter: LimitsMeter) -> str:
    """Format the row of the limits."""
    limits = meter.limits
    assert limits is not None
    one, eight, prompt = (
        limits.compute_seconds(rows, logit_rows=logits) for rows, logits in ((1, 1), (8, 8), (PROMPT, 1))
    )
    return (
        f"| {name}, {config.num_hidden_layers} layers | limit at {limits.describe_machine()} | {1 / one:.1f} | "
        f"{1e3 * one:.1f} | {1e3 * eight:.1f} | {1e3 * eight:.1f} | {eight / one:.2f} | {eight / one:.2f} | "
        f"{1e3 * prompt:.0f} | | | | |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--share", type=float, default=1.0, help="of the layers (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = load_library()
    assert library is not None
    library.sync_threads()
    print(f"{library.instruction_set}, {options.threads} threads\n")
    print(
        "| model | path | tokens/s | T(1) ms | chain of 8 | tree of 8 | T(8)/T(1), chain | tree | prompt of 256 | "
        "decoding, times faster than torch | chain | tree | prompt |"
    )
    print("|---|---|" + "---:|" * 11)
    for name in options.models.split(","):
        measure(name, MODELS[name](options.share), options.rounds)


if __name__ == "__main__":
    main()
