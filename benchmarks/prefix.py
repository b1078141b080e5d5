"""Saving by the prefix cache: time to first token and acceptance of a request that shares a prefix with an earlier one.

    python benchmarks/prefix.py [--prompts 12] [--prompt-tokens 512] [--shared 0.9] [--methods none,draft_model:2,...]
        [--json FILE] [--quick]

For every prompt and method, in turn: the first request, then one that shares the given part of its prompt and goes on
differently (TTFT from adding it to its first token), and the second one again where nothing is cached, under a salt of
its own. Greedy, so that both of the latter write the same text: their acceptance lengths show whether the draft's
memory of cached pages is as good as its own. TTFT over TTFT is the median over prompts; acceptance is over all.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from foredraft import LLM, Completion, Sampling
from foredraft.bench import methods
from foredraft.cli.speed_figures import sum_stats
from foredraft.drafters.registry import load_methods as registered
from foredraft.llm import MemoryLimits
from foredraft.outputs import Stats
from foredraft.request import RequestOptions
from foredraft.zoo.corpus import make_held_out_prompts

METHODS = "none,draft_model:2,eagle:2,ngram:8"
CHARS = 8  # of a text, for every token wanted: more than any needs
ALLOWED, NEAR = 0.25, 0.02


@dataclass(frozen=True)
class RequestResult:
    """One request, alone."""

    first: float  # seconds to the first token
    cached: int  # tokens of the prompt that were not computed
    completion: Completion


@dataclass
class PrefixRow:
    """One method."""

    method: str
    cold: list[float] = field(default_factory=list)  # seconds to the first token of the first request
    warm: list[float] = field(default_factory=list)  # of the second
    again: list[float] = field(default_factory=list)  # of the second, nothing cached
    cached: list[float] = field(default_factory=list)  # share of the second's prompt
    hit: list[Stats] = field(default_factory=list)
    miss: list[Stats] = field(default_factory=list)
    same_text: int = 0

    @property
    def ratio(self) -> float:
        return statistics.median(warm / cold for warm, cold in zip(self.warm, self.cold, strict=True))

    @property
    def acceptance(self) -> tuple[float, float]:
        """After a hit, and without."""
        return sum_stats(self.hit).acceptance_length, sum_stats(self.miss).acceptance_length


def run_request(llm: LLM, prompt: Sequence[int], sampling: Sampling, salt: str) -> RequestResult:
    """Add a request and step it to its end."""
    engine, first = llm.engine, 0.0
    began = time.perf_counter()
    (transcript,) = llm.prepare(prompt, sampling, RequestOptions(salt=salt.encode()))
    engine.add(transcript)
    while not transcript.is_finished:
        engine.step()
        if not first and transcript.num_tokens:
            first = time.perf_counter() - began
    completion = transcript.deltas[-1].completion
    if completion is None or completion.error is not None:
        raise SystemExit(f"a request failed: {completion and completion.error}")
    return RequestResult(first, transcript.request.num_cached_tokens or 0, completion)


def make_prompt_pairs(llm: LLM, count: int, size: int, shared: float) -> list[tuple[list[int], list[int]]]:
    """Prompts of `size` tokens that share their beginning; the rest of the second is the end of another text."""
    texts = [llm.tokenizer(text).input_ids for text in make_held_out_prompts(4 * count + 4, max_chars=CHARS * size)]
    texts = [ids[-size:] for ids in texts if len(ids) >= size][: count + 1]
    if len(texts) <= count:
        raise SystemExit(f"only {len(texts) - 1} prompts have {size} tokens; ask for fewer or shorter ones")
    split = round(shared * size)
    return [(ids, ids[:split] + other[split:]) for ids, other in pairwise(texts)]


def measure_pair(
    llm: LLM, row: PrefixRow, prompts: tuple[list[int], list[int]], number: int, sampling: Sampling
) -> None:
    first, second = prompts
    one = run_request(llm, first, sampling, f"{number}")
    if number % 2:  # what comes later may find warmer caches of the processor
        miss, hit = (
            run_request(llm, second, sampling, f"{number} alone"),
            run_request(llm, second, sampling, f"{number}"),
        )
    else:
        hit, miss = (
            run_request(llm, second, sampling, f"{number}"),
            run_request(llm, second, sampling, f"{number} alone"),
        )
    row.cold.append(one.first)
    row.warm.append(hit.first)
    row.again.append(miss.first)
    row.cached.append(hit.cached / len(second))
    row.hit.append(hit.completion.stats)
    row.miss.append(miss.completion.stats)
    row.same_text += hit.completion.token_ids == miss.completion.token_ids


def format_table(rows: Sequence[PrefixRow]) -> str:
    header = (
        "| method | TTFT of the first, ms | of the second | without the cache | second / first | of its prompt cached "
        "| acceptance length after a hit | without | texts equal |"
    )
    lines = [header, "|---" + "|---:" * 8 + "|"]
    for row in rows:
        first, second, again = (f"{1000 * statistics.median(t):.1f}" for t in (row.cold, row.warm, row.again))
        hit, miss = row.acceptance
        cached = f"{statistics.median(row.cached):.0%}"
        lines.append(
            f"| {row.method} | {first} | {second} | {again} | {row.ratio:.2f}x | {cached} | {hit:.3f} | {miss:.3f} | "
            f"{row.same_text}/{len(row.hit)} |"
        )
    return "\n".join(lines)


def format_verdict(row: PrefixRow) -> str:
    hit, miss = row.acceptance
    words = [f"{row.method}: TTFT {row.ratio:.2f}x", f"acceptance {hit / miss - 1:+.1%}"]
    words += [] if row.ratio <= ALLOWED else [f"TTFT above {ALLOWED}x"]
    words += [] if abs(hit / miss - 1) <= NEAR else [f"acceptance not within {NEAR:.0%}"]
    return ", ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--shared", type=float, default=0.9)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a smoke test; its figures mean nothing")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.prompt_tokens, options.max_tokens = 2, 96, 8
    llm = LLM(options.model, drafter=None, limits=MemoryLimits(kv_tokens=8 * (options.prompt_tokens + 128)))
    sampling = Sampling(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    engines: dict[str, LLM] = {}
    for text in options.methods.split(","):
        if text == "none":
            engines[text] = llm.with_drafter(None)
            continue
        (method,) = methods.attach_models(
            [methods.parse(text, sorted(registered()))], llm.target.model.config, None, llm.is_builtin
        )
        engines[text] = llm.with_drafter(dict(method.spec))
    prompts = make_prompt_pairs(llm, options.prompts, options.prompt_tokens, options.shared)
    rows = {name: PrefixRow(name) for name in engines}
    for name, engine in engines.items():  # warms up; what it leaves in the cache is under a salt of its own
        measure_pair(engine, PrefixRow(name), prompts[0], -1, sampling)
    for number, prompt in enumerate(prompts):
        names = [*engines][number % len(engines) :] + [*engines][: number % len(engines)]
        for name in names:
            measure_pair(engines[name], rows[name], prompt, number, sampling)
    print(format_table([*rows.values()]))
    for row in rows.values():
        print(format_verdict(row))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows.values()], indent=1))


if __name__ == "__main__":
    main()
