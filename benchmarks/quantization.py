"""Quality loss of int8 and int4 weights, measured with the built-in target on held-out text.

    python benchmarks/quantization.py [--windows 120] [--length 256]

Columns: loss in nats per token; its difference from the stored weights with standard error; mean KL divergence from the
distribution of the stored weights; share of tokens with the same argmax; bytes per weight of the matrices.
"""

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from foredraft import zoo
from foredraft.models.packed_linear import PackedLinear, pack_linears
from foredraft.zoo import corpus

BATCH = 8  # windows per forward pass


def load_held_out_windows(windows: int, length: int) -> Tensor:
    """Load evenly spaced windows of held-out token ids, as [windows, length + 1]."""
    tokenizer = AutoTokenizer.from_pretrained(zoo.find_folder("target"))
    _, files = corpus.split()
    ids = tokenizer("\n".join(file.text for file in files if not file.name.startswith("test/"))).input_ids
    starts = torch.linspace(0, len(ids) - length - 1, windows).long().tolist()
    return torch.tensor([ids[start : start + length + 1] for start in starts])


def compute_bytes_per_weight(model: torch.nn.Module) -> float:
    weights = [m.packed for m in model.modules() if isinstance(m, PackedLinear)]
    return sum(p.data.numel() for p in weights) / sum(p.n * p.k for p in weights)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=120)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    ids = load_held_out_windows(options.windows, options.length)
    # The stored weights are bfloat16. Activations are float32, so that differences come from quantisation alone.
    stored = AutoModelForCausalLM.from_pretrained(zoo.find_folder("target"), dtype=torch.float32).eval()
    bfloat16_model = AutoModelForCausalLM.from_pretrained(zoo.find_folder("target"), dtype=torch.bfloat16).eval()
    models = {"bf16": bfloat16_model, **{name: pack_linears(stored, name, is_owned=False) for name in ("int8", "int4")}}
    samples: dict[str, list[Tensor]] = {name: [] for name in models}
    for batch in ids.split(BATCH):
        stored_logprobs = stored(batch[:, :-1], use_cache=False).logits.log_softmax(-1)
        loss = F.nll_loss(stored_logprobs.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        for name, model in models.items():
            logprobs = model(batch[:, :-1], use_cache=False).logits.float().log_softmax(-1)
            difference = F.nll_loss(logprobs.flatten(0, 1), batch[:, 1:].flatten(), reduction="none") - loss
            divergence = (stored_logprobs.exp() * (stored_logprobs - logprobs)).sum(-1).flatten()
            is_same_argmax = (stored_logprobs.argmax(-1) == logprobs.argmax(-1)).float().flatten()
            samples[name].append(torch.stack([loss, difference, divergence, is_same_argmax]))
    print("| weights | loss | against stored | KL | same token | bytes per weight |\n|---|---|---|---|---|---|")
    for name, batches in samples.items():
        loss, difference, divergence, is_same_argmax = torch.cat(batches, 1)
        size = 2.0 if name == "bf16" else compute_bytes_per_weight(models[name])
        standard_error = difference.std() / len(difference) ** 0.5
        print(
            f"| {name} | {loss.mean() + difference.mean():.4f} | {difference.mean():+.4f} ± {standard_error:.4f} "
            f"| {divergence.mean():.5f} "
            f"| {is_same_argmax.mean():.1%} | {size:.2f} |"
        )


if __name__ == "__main__":
    main()
