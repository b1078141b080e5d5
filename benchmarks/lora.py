"""Cost of a forward pass with LoRA adapters: a batch without them, with one, and with four of different requests.

    python benchmarks/lora.py [--model builtin] [--rank 16] [--requests 8] [--rows 1,5,64] [--passes 60] [--threads 1]
    python benchmarks/lora.py --plain     # one column: time it on two checkouts in turn to compare them

Adapters have random matrices for all linear layers of the decoder. Every round runs each kind of batch once, in turn,
so that other work on the machine meets them alike. Figures are medians.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foredraft import LLM
from foredraft.models.forward_batch import ForwardBatch, Span

CONTEXT = 128  # tokens with KV before the rows of a pass
PAGE_SIZE = 16
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_ADAPTERS = 4


def write_adapter(folder: Path, model: Any, rank: int, seed: int) -> Path:
    """Write an adapter with random matrices."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in MODULES:
            name = f"base_model.model.{path}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=generator) * 0.02
            tensors[f"{name}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=generator) * 0.02
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def build_batch(num_requests: int, num_rows: int, adapters: list[Any]) -> ForwardBatch:
    """Build a pass of `num_rows` rows for each request; adapters are given to the requests in turn."""
    num_pages = -(-(CONTEXT + num_rows) // PAGE_SIZE)
    spans = []
    for i in range(num_requests):
        pages = range(1 + i * num_pages, 1 + (i + 1) * num_pages)
        tokens = [5 + (7 * i + j) % 500 for j in range(num_rows)]
        given = {"adapter": adapters[i % len(adapters)]} if adapters else {}
        spans.append(Span(list(pages), CONTEXT, tokens, range(num_rows), **given))
    return ForwardBatch.from_spans(spans, PAGE_SIZE, "cpu", last_only=num_rows > PAGE_SIZE)


def fill_context(llm: LLM, num_requests: int, num_rows: int) -> None:
    """Write the keys and values that the rows of `build_batch` see."""
    num_pages = -(-(CONTEXT + num_rows) // PAGE_SIZE)
    spans = [
        Span(list(range(1 + i * num_pages, 1 + (i + 1) * num_pages)), 0, [5] * CONTEXT, range(CONTEXT))
        for i in range(num_requests)
    ]
    llm.target.forward(ForwardBatch.from_spans(spans, PAGE_SIZE, "cpu", last_only=True))


@torch.inference_mode()
def measure(llm: LLM, kinds: dict[str, list[Any]], num_requests: int, num_rows: int, passes: int) -> dict[str, float]:
    """Return the median milliseconds of a pass by kind of batch."""
    fill_context(llm, num_requests, num_rows)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(passes):
        for name, adapters in kinds.items():
            start = time.perf_counter()
            llm.target.forward(build_batch(num_requests, num_rows, adapters))
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rows", default="1,5,64", help="rows of each request, by pass")
    parser.add_argument("--passes", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="no adapters")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm = LLM(args.model, None)
    kinds: dict[str, list[Any]] = {"none": []}
    if not args.plain:
        with tempfile.TemporaryDirectory() as folder:
            for i in range(NUM_ADAPTERS):
                llm.add_adapter(str(i), write_adapter(Path(folder) / str(i), llm.target.model, args.rank, i))
        loaded = [llm.target.adapters.find(name) for name in llm.adapter_names]
        kinds |= {"one": loaded[:1], "four": loaded}
        print(f"one adapter of rank {args.rank}: {loaded[0].num_bytes / 2**20:.1f} MiB")
    print(f"| rows of {args.requests} requests | " + " | ".join(f"{name}, ms" for name in kinds) + " |")
    print("|---|" + "---|" * len(kinds))
    for rows in map(int, args.rows.split(",")):
        found = measure(llm, kinds, args.requests, rows, args.passes)
        cells = [f"{found[name]:.2f} ({found[name] / found['none']:.2f}x)" for name in kinds]
        print(f"| {args.requests} x {rows} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
