"""Speed of a vision-language checkpoint with text alone, beside its text model as a checkpoint of its own.

    python -m benchmarks.vision_text [--threads 2] [--rounds 9] [--tokens 64] [--layers 8]

A random LLaVA in bfloat16 is saved whole, and its text model by itself. Three targets take turns: the text model, the
whole checkpoint without its image part, and with it (`max_images=1`). All decode the same prompt greedily, without
drafts, and must have the same tokens. The table has the median of each and, as its own median, the ratio of every round
to the text model. With `--limit 2` the exit status is 1 if a ratio lies more than 2 % below 1.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers as hf

from foredraft import LLM, Sampling
from tests.support.tiny_vision import EYES, KINDS, SPECIAL

WIDTH, VOCAB = 1024, 32_000
TEXT, WHOLE, WITH_IMAGES = "text model", "vision checkpoint", "vision checkpoint, max_images=1"


def save_checkpoints(folder: Path, num_layers: int) -> None:
    """Save a random model whole, and its text part."""
    torch.manual_seed(0)
    text = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=3072, num_hidden_layers=num_layers,
        num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    config = hf.LlavaConfig(
        text_config=text, vision_config=hf.CLIPVisionConfig(**EYES), image_token_index=SPECIAL.index("<image>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    whole = hf.LlavaForConditionalGeneration(config).to(torch.bfloat16)
    whole.save_pretrained(folder / "whole")
    KINDS["llava"].make_processor().save_pretrained(folder / "whole")
    alone = hf.LlamaForCausalLM(text).to(torch.bfloat16)
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    alone.lm_head.load_state_dict(whole.lm_head.state_dict())
    alone.save_pretrained(folder / "text")


def measure(llms: dict[str, LLM], rounds: int, tokens: int) -> dict[str, list[float]]:
    """Return the seconds per token of every target, by round. Raises SystemExit if their tokens differ."""
    sampling = Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompt = [15 + i % 80 for i in range(64)]
    seconds: dict[str, list[float]] = {name: [] for name in llms}
    for number in range(rounds + 1):
        outputs = set[tuple[int, ...]]()
        for name in llms if number % 2 else reversed(llms):
            start = time.perf_counter()
            [completion] = llms[name].generate([prompt], sampling)
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - start) / tokens)
            outputs.add(tuple(completion.token_ids))
        if len(outputs) > 1:
            raise SystemExit("the tokens differ")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--limit", type=float, default=None, help="largest loss in percent (default: none)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_checkpoints(folder, options.layers)
        llms = {
            TEXT: LLM(str(folder / "text"), None, tokenizer=None),
            WHOLE: LLM(str(folder / "whole"), None, tokenizer=None),
            WITH_IMAGES: LLM(str(folder / "whole"), None, max_images=1, tokenizer=None),
        }
        seconds = measure(llms, options.rounds, options.tokens)
    print("| target | ms per token | speed of the text model |\n|---|---:|---:|")
    losses = []
    for name, times in seconds.items():
        ratio = statistics.median(base / own for base, own in zip(seconds[TEXT], times, strict=True))
        losses.append(100 * (1 - ratio))
        print(f"| {name} | {1e3 * statistics.median(times):.2f} | {ratio:.3f} |")
    if options.limit is not None and max(losses) > options.limit:
        raise SystemExit(f"a target loses {max(losses):.1f} %")


if __name__ == "__main__":
    main()
