"""Greedy decoding of the built-in pair on held-out prompts: plain, every method, and transformers, in one run.

    python benchmarks/speedup.py [--prompts 50] [--tokens 128] [--methods draft_model:3,ngram:5] [--json FILE]

Every prompt goes through all of them in turn before the next prompt, in rotating order, so that a slow minute of the
machine hits all alike. The speed-up is the median over prompts of (plain's time / the method's time).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from foredraft import LLM, Completion, Sampling, zoo
from foredraft.drafters.base import methods
from foredraft.zoo.corpus import held_out_prompts

DEFAULT_TOKENS = {"draft_model": 2, "ngram": 8, "ngram_lm": 5}


@dataclass(frozen=True)
class Row:
    method: str
    tokens_per_s: float
    speedup: float
    acceptance_length: float
    acceptance_rate: float
    draft_share: float
    identical: int  # prompts whose text equals plain decoding's
    prompts: int


Run = Callable[[list[int], int], tuple[float, list[int], Completion | None]]


def ours(llm: LLM, is_greedy: bool) -> Run:
    def run(prompt: list[int], tokens: int) -> tuple[float, list[int], Completion | None]:
        sampling = Sampling(max_tokens=tokens, temperature=0.0 if is_greedy else 1.0, ignore_eos=True)
        began = time.perf_counter()
        (completion,) = llm.generate([prompt], sampling)
        return time.perf_counter() - began, completion.token_ids, completion

    return run


def transformers_generate(is_greedy: bool) -> Run:
    model = AutoModelForCausalLM.from_pretrained(zoo.path("target"), dtype=torch.bfloat16).eval()

    def run(prompt: list[int], tokens: int) -> tuple[float, list[int], None]:
        ids = torch.tensor([prompt])
        began = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=not is_greedy, top_k=0, pad_token_id=0,
        )  # fmt: skip
        return time.perf_counter() - began, out[0, len(prompt) :].tolist(), None

    return run


def contenders(specs: list[str], is_greedy: bool) -> dict[str, Run]:
    plain = LLM(drafter=None)
    runs: dict[str, Run] = {"plain": ours(plain, is_greedy), "transformers": transformers_generate(is_greedy)}
    for spec in specs:
        method, _, count = spec.partition(":")
        tokens = int(count) if count else DEFAULT_TOKENS.get(method)
        runs[f"{method} (K={tokens})"] = ours(plain.with_drafter(method, tokens), is_greedy)
    return runs


def measure(runs: dict[str, Run], prompts: list[list[int]], tokens: int) -> list[Row]:
    for run in runs.values():  # warm-up
        run(prompts[0], 16)
    seen: dict[str, list[tuple[float, list[int], Completion | None]]] = {name: [] for name in runs}
    names = list(runs)
    for i, prompt in enumerate(prompts):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seen[name].append(runs[name](prompt, tokens))
    return [row(name, seen[name], seen["plain"]) for name in names]


def row(name: str, results: list, plain: list) -> Row:
    times, stats = [r[0] for r in results], [r[2].stats for r in results if r[2] is not None]
    emitted, passes = sum(s.num_tokens for s in stats), sum(s.target_passes for s in stats)
    drafted, accepted = sum(s.num_drafted for s in stats), sum(s.num_accepted for s in stats)
    return Row(
        method=name,
        tokens_per_s=sum(len(r[1]) for r in results) / sum(times),
        speedup=statistics.median(p[0] / r[0] for p, r in zip(plain, results, strict=True)),
        acceptance_length=emitted / passes if passes else 1.0,
        acceptance_rate=accepted / drafted if drafted else 0.0,
        draft_share=sum(s.draft_time for s in stats) / sum(times),
        identical=sum(p[1] == r[1] for p, r in zip(plain, results, strict=True)),
        prompts=len(results),
    )


def table(rows: list[Row]) -> str:
    lines = [
        "| method | tokens/s | speed-up | acceptance length | acceptance rate | drafting share | identical to plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.method} | {r.tokens_per_s:.1f} | {r.speedup:.2f}x | {r.acceptance_length:.2f} | "
            f"{r.acceptance_rate:.2f} | {r.draft_share:.0%} | {r.identical}/{r.prompts} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sampled", action="store_true", help="temperature 1 instead of greedy")
    parser.add_argument(
        "--methods", default=",".join(sorted(methods())), help="method or method:K, separated by commas"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    llm = LLM(drafter=None)
    prompts = [llm.tokenizer(text).input_ids for text in held_out_prompts(args.prompts)]
    rows = measure(contenders(args.methods.split(","), not args.sampled), prompts, args.tokens)
    print(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, {args.prompts} prompts x {args.tokens} tokens\n"
    )
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
