"""Share of the memory bandwidth at which native code decodes one token, for every family with native code.

    python -m benchmarks.family_bandwidth [--threads 2] [--rounds 15] [--families gemma2,olmoe]

Random bfloat16 models have the widths of published ones, with fewer layers and a smaller vocabulary, so that each takes
0.3 to 3 GB. A pass computes one row behind 64 tokens. It reads all weights once: of the experts those that the row
chooses, of the embeddings one row. `of the bandwidth` is this number of bytes by the time of a pass, divided by the
bandwidth of sequential reads right before and after it; the median of the rounds. The last line has the lowest share.
"""

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from benchmarks.experts import READ_BYTES, build_batch, count_bytes, time_call
from foredraft.kernels.cpu.library import NativeLibrary, load_library
from foredraft.models.hf import HFModel

VOCAB = 32_768
WANTED = 0.9  # share of the bandwidth


def size(width: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """Return the sizes of a configuration."""
    return {
        "vocab_size": VOCAB, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    } | more  # fmt: skip


SHAPES: dict[str, Callable[[], Any]] = {
    "llama (3.2 1B)": lambda: hf.LlamaConfig(**size(2048, 8192, 6, 32, 8)),
    "qwen3 (0.6B)": lambda: hf.Qwen3Config(**size(1024, 3072, 14, 16, 8, head_dim=128)),
    "gemma2 (2B)": lambda: hf.Gemma2Config(**size(2304, 9216, 4, 8, 4, head_dim=256)),
    "gemma3 (1B)": lambda: hf.Gemma3TextConfig(**size(1152, 6912, 12, 4, 1, head_dim=256)),
    "phi3 (mini)": lambda: hf.Phi3Config(**size(3072, 8192, 3, 32, 32)),
    "olmo2 (1B)": lambda: hf.Olmo2Config(**size(2048, 8192, 5, 16, 16)),
    "olmo3 (7B)": lambda: hf.Olmo3Config(**size(4096, 11008, 2, 32, 32)),
    "glm4 (9B)": lambda: hf.Glm4Config(**size(4096, 13696, 2, 32, 2, head_dim=128)),
    "smollm3 (3B)": lambda: hf.SmolLM3Config(**size(2048, 11008, 4, 16, 4)),
    "ernie4_5 (0.3B)": lambda: hf.Ernie4_5Config(**size(1024, 3072, 14, 16, 2, head_dim=128)),
    "cohere2 (7B)": lambda: hf.Cohere2Config(**size(4096, 14336, 2, 32, 8)),
    "qwen3_moe (30B-A3B)": lambda: hf.Qwen3MoeConfig(
        **size(2048, 6144, 2, 32, 4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8),
        norm_topk_prob=True,
    ),
    "gpt_oss (20B)": lambda: hf.GptOssConfig(
        **size(2880, 2880, 1, 64, 8, head_dim=64, num_local_experts=32, num_experts_per_tok=4)
    ),
    "mixtral (8x7B)": lambda: hf.MixtralConfig(
        **size(4096, 14336, 1, 32, 8, num_local_experts=4, num_experts_per_tok=2)
    ),
    "olmoe (7B-A1B)": lambda: hf.OlmoeConfig(
        **size(2048, 1024, 4, 16, 16, num_experts=64, num_experts_per_tok=8)
    ),
}  # fmt: skip


@torch.inference_mode()
def measure(name: str, config: Any, rounds: int, library: NativeLibrary) -> float:
    """Measure one family, print its line, and return its share of the bandwidth."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    num_bytes = count_bytes(model, getattr(config, "num_experts_per_tok", 0))
    native = HFModel.wrap_model(model, name, is_fused=True)
    assert native.fused is not None, f"{name} has no native code"
    memory, batch = torch.zeros(READ_BYTES, dtype=torch.uint8), build_batch(1)

    def read() -> float:
        """Return the bandwidth of sequential reads, in bytes per second."""
        return READ_BYTES / time_call(library.handle.fd_read_memory, memory.data_ptr(), READ_BYTES)

    passes, bandwidths, shares = list[float](), list[float](), list[float]()
    for number in range(rounds + 1):
        before, seconds, after = read(), time_call(native.forward, batch), read()
        if number:  # the first round warms up
            passes.append(seconds)
            bandwidths.append((before + after) / 2)
            shares.append(num_bytes / seconds / bandwidths[-1])
    bandwidth, seconds, share = (statistics.median(each) for each in (bandwidths, passes, shares))
    print(
        f"| {name}, {config.num_hidden_layers} layers | {num_bytes / 1e6:.0f} | {1e3 * seconds:.1f} | "
        f"{bandwidth / 1e9:.1f} | {100 * share:.0f} % |",
        flush=True,
    )
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--families", default="", help="model types, such as gemma2,olmoe (default: all)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = load_library()
    assert library is not None
    library.sync_threads()
    wanted = options.families.split(",") if options.families else [name.split()[0] for name in SHAPES]
    unknown = set(wanted) - {name.split()[0] for name in SHAPES}
    if unknown:
        parser.error(f"unknown families: {', '.join(sorted(unknown))}")
    print(f"{library.instruction_set}, {options.threads} threads\n")
    print("| model | MB of a pass | ms | GB/s | of the bandwidth |\n|---|---:|---:|---:|---:|")
    shares = {}
    for name, shape in SHAPES.items():
        if name.split()[0] in wanted:
            shares[name] = measure(name, shape(), options.rounds, library)
            gc.collect()
    lowest = min(shares, key=lambda name: shares[name])
    reached = sum(share >= WANTED for share in shares.values())
    print(f"\nlowest: {lowest}, {100 * shares[lowest]:.0f} %; {reached} of {len(shares)} reach {100 * WANTED:.0f} %")


if __name__ == "__main__":
    main()
