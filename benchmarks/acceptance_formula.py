"""Acceptance rate and speed-up for K = 1..8, compared with the formula of 2211.17192: (1-a^(K+1)) / ((1-a)(Kc+1)).

    python benchmarks/acceptance_formula.py [--prompts 20] [--out docs/acceptance-formula.png]

a is the acceptance rate in the same runs: accepted over verified draft tokens. c is the time of one draft pass over one
target pass. Measured are the draft model of the built-in pair and, with --undistilled FOLDER, the same shape trained
without the target; greedy and at temperature 1.
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from foredraft import LLM, Completion, Sampling
from foredraft.bench.latency import PromptRun, measure
from foredraft.bench.methods import PLAIN
from foredraft.bench.questions import Question, load_questions

DRAFTS = range(1, 9)  # draft lengths K


@dataclass(frozen=True)
class AcceptancePoint:
    draft: str
    is_greedy: bool
    num_tokens: int  # K
    alpha: float  # acceptance rate: accepted over verified draft tokens
    cost: float  # c: seconds of one draft pass over those of one target pass in plain decoding
    speedup: float  # median over prompts
    acceptance_length: float

    @property
    def expected_length(self) -> float:
        return (1 - self.alpha ** (self.num_tokens + 1)) / (1 - self.alpha)

    @property
    def formula(self) -> float:
        return self.expected_length / (self.num_tokens * self.cost + 1)


def count_verified(completion: Completion, k: int) -> tuple[int, int]:
    """Return (accepted, verified) draft tokens.

    Verification of a draft ends at its first rejection, so a rejected draft has one more verified than accepted token.
    """
    s = completion.stats
    full = s.accepted_at[k - 1] if len(s.accepted_at) >= k else 0
    return s.num_accepted, s.num_accepted + s.num_drafts - full


def measure_lengths(
    questions: list[Question], tokens: int, draft: str | None, label: str, is_greedy: bool
) -> list[AcceptancePoint]:
    plain = LLM(drafter=None)
    spec = {"method": "draft_model", **({"model": draft} if draft else {})}
    generators = {PLAIN: plain} | {str(k): plain.with_drafter(spec, k) for k in DRAFTS}
    sampling = Sampling(max_tokens=tokens, temperature=0.0 if is_greedy else 1.0, ignore_eos=True)
    outcome = measure(
        generators, questions, plain.tokenizer, plain.target.context_length, sampling, 1, lambda name: None
    )
    base = outcome.runs[PLAIN]
    target_pass_seconds = statistics.median(run.seconds / tokens for run in base)
    return [build_point(k, outcome.runs[str(k)], base, target_pass_seconds, label, is_greedy) for k in DRAFTS]


def build_point(
    k: int, runs: list[PromptRun], base: list[PromptRun], target_pass_seconds: float, label: str, is_greedy: bool
) -> AcceptancePoint:
    completions = [run.completions[0] for run in runs]
    pairs = [count_verified(c, k) for c in completions]
    passes = sum(c.stats.target_passes for c in completions)
    draft_pass_seconds = sum(c.stats.draft_time for c in completions) / passes / k
    return AcceptancePoint(
        draft=label,
        is_greedy=is_greedy,
        num_tokens=k,
        alpha=sum(a for a, _ in pairs) / max(1, sum(n for _, n in pairs)),
        cost=draft_pass_seconds / target_pass_seconds,
        speedup=statistics.median(b.seconds / r.seconds for b, r in zip(base, runs, strict=True)),
        acceptance_length=sum(c.stats.num_tokens for c in completions) / passes,
    )


def save_plot(points: list[AcceptancePoint], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    groups = sorted({(p.draft, p.is_greedy) for p in points})
    for color, (draft, is_greedy) in zip(plt.cm.tab10.colors, groups, strict=False):
        group = [p for p in points if (p.draft, p.is_greedy) == (draft, is_greedy)]
        ks, label = [p.num_tokens for p in group], f"{draft}, {'greedy' if is_greedy else 'T = 1'}"
        left.plot(ks, [p.acceptance_length for p in group], "o-", color=color, label=label)
        left.plot(ks, [p.expected_length for p in group], "--", color=color, alpha=0.7)
        right.plot(ks, [p.speedup for p in group], "o-", color=color, label=label)
        right.plot(ks, [p.formula for p in group], "--", color=color, alpha=0.7)
    left.set(xlabel="draft length K", ylabel="tokens per target pass", title="acceptance length")
    right.set(xlabel="draft length K", ylabel="speed-up over plain decoding", title="speed-up")
    right.axhline(1, color="grey", linewidth=0.8)
    left.legend(title="measured; dashed: the formula", fontsize=8)
    figure.savefig(path, dpi=110)


def format_table(points: list[AcceptancePoint]) -> str:
    lines = [
        "| draft | sampling | K | alpha | c | acceptance length | formula | speed-up | formula |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for p in points:
        lines.append(
            f"| {p.draft} | {'greedy' if p.is_greedy else 'T = 1'} | {p.num_tokens} | {p.alpha:.3f} | {p.cost:.3f} | "
            f"{p.acceptance_length:.2f} | {p.expected_length:.2f} | {p.speedup:.2f}x | {p.formula:.2f}x |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--undistilled", help="folder of the draft model that was trained without the target")
    parser.add_argument("--out", type=Path, default=Path("docs/acceptance-formula.png"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    questions = load_questions(None, args.prompts)
    drafts = [(None, "distilled")] + ([(args.undistilled, "undistilled")] if args.undistilled else [])
    points = [
        p for draft, label in drafts for is_greedy in (True, False)
        for p in measure_lengths(questions, args.tokens, draft, label, is_greedy)
    ]  # fmt: skip
    print(format_table(points))
    save_plot(points, args.out)
    if args.json:
        args.json.write_text(json.dumps([asdict(p) for p in points], indent=1) + "\n")


if __name__ == "__main__":
    main()
