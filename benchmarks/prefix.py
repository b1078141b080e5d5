"""Effect of the prefix cache on time to first token (TTFT) and acceptance length.

    python benchmarks/prefix.py [--prompts 12] [--prompt-tokens 512] [--shared 0.9] [--methods none,draft_model:2,...]
        [--json FILE] [--quick]

Methods take turns prompt by prompt. Each runs three requests: a first one; a second one that shares the given part of
its prompt and continues differently; and the second one again with a new salt, so that nothing is cached. TTFT counts
from adding a request to its first token. Decoding is greedy, so the last two requests have the same output. Their
acceptance lengths show whether draft KV of cached pages is as good as computed draft KV. The ratio of TTFTs is the
median over prompts; acceptance lengths are over all prompts.
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
from foredraft.bench.pass_limits import LimitsMeter
from foredraft.drafters.registry import load_methods
from foredraft.llm import MemoryLimits
from foredraft.outputs import Stats, sum_stats
from foredraft.request_options import RequestOptions
from foredraft.zoo.corpus import make_held_out_prompts

# Default of --methods; the number is the draft length.
METHODS = "none,draft_model:2,eagle:2,ngram:8"
CHARS = 8  # characters of text per token of a prompt, more than needed
ALLOWED = 0.25  # maximum of TTFT of the second request over the first
NEAR = 0.02  # maximum relative difference of acceptance lengths


@dataclass(frozen=True)
class RequestResult:
    """Result of one request that runs alone."""

    first: float  # seconds to the first token
    cached: int  # prompt tokens from the prefix cache
    completion: Completion


@dataclass
class PrefixRow:
    """Figures of one method, one entry per prompt."""

    method: str
    cold: list[float] = field(default_factory=list)  # TTFT of the first request, seconds
    warm: list[float] = field(default_factory=list)  # TTFT of the second request
    again: list[float] = field(default_factory=list)  # TTFT of the second request without the cache
    cached: list[float] = field(default_factory=list)  # share of the prompt of the second request
    hit: list[Stats] = field(default_factory=list)  # of the second request
    miss: list[Stats] = field(default_factory=list)  # of the second request without the cache
    same_text: int = 0  # prompts for which these two have the same output

    @property
    def ratio(self) -> float:
        return statistics.median(warm / cold for warm, cold in zip(self.warm, self.cold, strict=True))

    @property
    def acceptance(self) -> tuple[float, float]:
        """Acceptance length with and without a prefix-cache hit."""
        return sum_stats(self.hit).acceptance_length, sum_stats(self.miss).acceptance_length


def run_request(llm: LLM, prompt: Sequence[int], sampling: Sampling, salt: str) -> RequestResult:
    """Add a request and step the engine to its end."""
    engine, first_token_seconds = llm.engine, 0.0
    start = time.perf_counter()
    (transcript,) = llm.prepare(prompt, sampling, RequestOptions(salt=salt.encode()))
    engine.add(transcript)
    while not transcript.is_finished:
        engine.step()
        if not first_token_seconds and transcript.num_tokens:
            first_token_seconds = time.perf_counter() - start
    completion = transcript.deltas[-1].completion
    if completion is None or completion.error is not None:
        raise SystemExit(f"a request failed: {completion and completion.error}")
    return RequestResult(first_token_seconds, transcript.request.num_cached_tokens or 0, completion)


def make_prompt_pairs(llm: LLM, count: int, size: int, shared: float) -> list[tuple[list[int], list[int]]]:
    """Make pairs of prompts of `size` tokens with a shared beginning; the second ends like another text."""
    texts = [llm.tokenizer(text).input_ids for text in make_held_out_prompts(4 * count + 4, max_chars=CHARS * size)]
    texts = [ids[-size:] for ids in texts if len(ids) >= size][: count + 1]
    if len(texts) <= count:
        raise SystemExit(f"only {len(texts) - 1} prompts have {size} tokens; lower --prompts or --prompt-tokens")
    split = round(shared * size)
    return [(ids, ids[:split] + other[split:]) for ids, other in pairwise(texts)]


def measure_pair(
    llm: LLM, row: PrefixRow, prompts: tuple[list[int], list[int]], number: int, sampling: Sampling
) -> None:
    first, second = prompts
    cold = run_request(llm, first, sampling, f"{number}")
    if number % 2:  # alternates the order, as the later request may have warmer processor caches
        miss, hit = (
            run_request(llm, second, sampling, f"{number} alone"),
            run_request(llm, second, sampling, f"{number}"),
        )
    else:
        hit, miss = (
            run_request(llm, second, sampling, f"{number}"),
            run_request(llm, second, sampling, f"{number} alone"),
        )
    row.cold.append(cold.first)
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
    parts = [f"{row.method}: TTFT {row.ratio:.2f}x", f"acceptance {hit / miss - 1:+.1%}"]
    parts += [] if row.ratio <= ALLOWED else [f"TTFT above {ALLOWED}x"]
    parts += [] if abs(hit / miss - 1) <= NEAR else [f"acceptance not within {NEAR:.0%}"]
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--shared", type=float, default=0.9)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="smoke test; its figures have no meaning")
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
            [methods.parse(text, sorted(load_methods()))], llm.target.model.config, None, llm.is_builtin
        )
        engines[text] = llm.with_drafter(dict(method.spec))
    prompts = make_prompt_pairs(llm, options.prompts, options.prompt_tokens, options.shared)
    rows = {name: PrefixRow(name) for name in engines}
    meter = LimitsMeter(llm.target)
    for name, engine in engines.items():  # warm-up; its salt separates its pages from the measurement
        measure_pair(engine, PrefixRow(name), prompts[0], -1, sampling)
    for number, prompt in enumerate(prompts):
        meter.measure()
        names = [*engines][number % len(engines) :] + [*engines][: number % len(engines)]
        for name in names:
            measure_pair(engines[name], rows[name], prompt, number, sampling)
    print(format_table([*rows.values()]))
    if meter.limits is not None:
        size = options.prompt_tokens
        page_size = llm.limits.page_size
        rest = size - round(options.shared * size) // page_size * page_size
        print(
            f"limits at {meter.limits.describe_machine()}: {meter.limits.describe(size, logit_rows=1)} for {size} "
            f"tokens of a prompt, {meter.limits.describe(rest, logit_rows=1)} for the {rest} that are not cached"
        )
    for row in rows.values():
        print(format_verdict(row))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows.values()], indent=1))


if __name__ == "__main__":
    main()
