"""Quality loss of int8 keys and values, measured with the built-in target on held-out text.

    python -m benchmarks.kv_dtype [--windows 60] [--length 256] [--write-model FOLDER]

Both runs are native code with the stored bfloat16 weights. Columns: loss in nats per token; its difference from the
run with the model's own keys and values, with standard error; mean KL divergence from its distribution; share of tokens
with the same argmax; KV bytes of a token.

`--write-model` writes a random Llama with a long context (0.5 billion parameters) and ends. Its passes at 4,096 to
32,768 tokens are measured by

    foredraft bench compare --model FOLDER --prompts 0 --verify-cost 1,8,64 --context 4096 [--kv-dtype int8]
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.quantization import load_held_out_windows
from foredraft import LLM, zoo
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.loading import load_tokenizer

PAGE_SIZE = 16
LONG_SHAPE = {
    "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 24,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 40_960,
}  # fmt: skip


def write_model(folder: Path) -> None:
    tokenizer = load_tokenizer(str(zoo.find_folder("target")))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **LONG_SHAPE)).bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def compute_logprobs(llm: LLM, ids: list[int]) -> Tensor:
    """Return log-probabilities [L, V] after each token."""
    pages = list(range(1, 2 + len(ids) // PAGE_SIZE))
    batch = ForwardBatch.build([Span(pages, 0, ids, range(len(ids)))], range(len(ids)), PAGE_SIZE, torch.device("cpu"))
    return llm.target.forward(batch)[0].log_softmax(-1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=60)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--write-model", type=Path)
    options = parser.parse_args()
    if options.write_model is not None:
        write_model(options.write_model)
        return
    targets = {name: LLM("builtin", None, kv_dtype=name) for name in ("auto", "int8")}
    samples: dict[str, list[Tensor]] = {name: [] for name in targets}
    for window in load_held_out_windows(options.windows, options.length):
        stored = compute_logprobs(targets["auto"], window[:-1].tolist())
        loss = F.nll_loss(stored, window[1:], reduction="none")
        for name, llm in targets.items():
            logprobs = compute_logprobs(llm, window[:-1].tolist())
            difference = F.nll_loss(logprobs, window[1:], reduction="none") - loss
            divergence = (stored.exp() * (stored - logprobs)).sum(-1)
            is_same_argmax = (stored.argmax(-1) == logprobs.argmax(-1)).float()
            samples[name].append(torch.stack([loss, difference, divergence, is_same_argmax]))
    print("| keys and values | loss | against auto | KL | same token | bytes per token |\n|---|---|---|---|---|---|")
    for name, batches in samples.items():
        loss, difference, divergence, is_same_argmax = torch.cat(batches, 1)
        error = float(difference.std()) / len(difference) ** 0.5
        print(
            f"| {name} | {float((loss + difference).mean()):.4f} | {float(difference.mean()):+.5f} +- {error:.5f} | "
            f"{float(divergence.mean()):.6f} | {100 * float(is_same_argmax.mean()):.2f} % | "
            f"{targets[name].target.bytes_per_token()} |"
        )


if __name__ == "__main__":
    main()
