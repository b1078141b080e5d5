"""Quality loss by int8 and int4: the built-in target on held-out text.

    python benchmarks/quantization.py [--windows 120] [--length 256]

Loss in nats per token, with its standard error against the weights as stored; mean KL divergence from their
distribution; how
often the likeliest token is the same; bytes per weight of the matrices.
"""

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from foredraft import zoo
from foredraft.models.packed_linear import PackedLinear, pack_linears
from foredraft.zoo import corpus

BATCH = 8


def load_held_out_windows(windows: int, length: int) -> Tensor:
    """[W, L + 1] evenly spaced windows."""
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
    # bfloat16 as stored; float32 activations, so that what is seen is the quantisation alone
    stored = AutoModelForCausalLM.from_pretrained(zoo.find_folder("target"), dtype=torch.float32).eval()
    half = AutoModelForCausalLM.from_pretrained(zoo.find_folder("target"), dtype=torch.bfloat16).eval()
    models = {"bf16": half, **{name: pack_linears(stored, name, is_owned=False) for name in ("int8", "int4")}}
    found: dict[str, list[Tensor]] = {name: [] for name in models}
    for part in ids.split(BATCH):
        exact = stored(part[:, :-1], use_cache=False).logits.log_softmax(-1)
        loss = F.nll_loss(exact.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        for name, model in models.items():
            ours = model(part[:, :-1], use_cache=False).logits.float().log_softmax(-1)
            more = F.nll_loss(ours.flatten(0, 1), part[:, 1:].flatten(), reduction="none") - loss
            away = (exact.exp() * (exact - ours)).sum(-1).flatten()
            same = (exact.argmax(-1) == ours.argmax(-1)).float().flatten()
            found[name].append(torch.stack([loss, more, away, same]))
    print("| weights | loss | against stored | KL | same token | bytes per weight |\n|---|---|---|---|---|---|")
    for name, parts in found.items():
        loss, more, away, same = torch.cat(parts, 1)
        size = 2.0 if name == "bf16" else compute_bytes_per_weight(models[name])
        spread = more.std() / len(more) ** 0.5
        print(
            f"| {name} | {loss.mean() + more.mean():.4f} | {more.mean():+.4f} ± {spread:.4f} | {away.mean():.5f} "
            f"| {same.mean():.1%} | {size:.2f} |"
        )


if __name__ == "__main__":
    main()
