"""Chains of K draft tokens, measured beside the formula of 2211.17192."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foredraft.bench.latency import LatencyOutcome, PromptRun
from foredraft.bench.methods import PLAIN
from foredraft.bench.report import ReportTable
from foredraft.outputs import Completion


@dataclass(frozen=True)
class ChainPoint:
    """Figures of drafts of one length by one draft model."""

    draft: str
    mode: str
    num_tokens: int  # K
    alpha: float  # acceptance rate: accepted over verified draft tokens
    cost: float  # c: seconds of one draft pass over those of one target pass in plain decoding
    speed_up: float  # median over prompts
    acceptance_length: float  # tokens per pass of the target, bonus token included

    @property
    def expected_length(self) -> float:
        return compute_expected_length(self.alpha, self.num_tokens)

    @property
    def formula(self) -> float:
        return compute_formula(self.alpha, self.num_tokens, self.cost)


def compute_expected_length(alpha: float, num_tokens: int) -> float:
    """Compute the expected tokens per pass: (1 - a^(K+1)) / (1 - a), from 2211.17192."""
    return sum(alpha**i for i in range(num_tokens + 1))  # has no hole at a = 1


def compute_formula(alpha: float, num_tokens: int, cost: float) -> float:
    """Compute the speed-up by 2211.17192: (1 - a^(K+1)) / ((1 - a)(Kc + 1)).

    Args:
        alpha: acceptance rate a.
        num_tokens: draft length K.
        cost: time of a draft pass over that of a target pass, c.
    """
    return compute_expected_length(alpha, num_tokens) / (num_tokens * cost + 1)


def solve_alpha(speed_up: float, num_tokens: int, cost: float) -> float | None:
    """Solve the formula for the acceptance rate; None if no rate reaches the speed-up."""
    if compute_formula(1.0, num_tokens, cost) < speed_up:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection: the formula increases with the acceptance rate
        middle = (low + high) / 2
        low, high = (middle, high) if compute_formula(middle, num_tokens, cost) < speed_up else (low, middle)
    return high


def count_verified(completion: Completion, num_tokens: int) -> tuple[int, int]:
    """Count (accepted, verified) draft tokens.

    Verification of a draft ends at its first rejection, so a rejected draft has one more verified than accepted token.
    """
    stats = completion.stats
    full = stats.accepted_at[num_tokens - 1] if len(stats.accepted_at) >= num_tokens else 0
    return stats.num_accepted, stats.num_accepted + stats.num_drafts - full


def build_points(outcome: LatencyOutcome, chains: Mapping[str, tuple[str, int]], mode: str) -> list[ChainPoint]:
    """Build the points of a run.

    Args:
        outcome: runs by label, plain decoding included.
        chains: label -> (draft, K).
        mode: name of the sampling.
    """
    base = outcome.runs[PLAIN]
    pass_seconds = statistics.median(run.seconds / max(1, len(run.tokens)) for run in base)
    return [
        _build_point(draft, mode, length, outcome.runs[label], base, pass_seconds)
        for label, (draft, length) in chains.items()
    ]


def _build_point(
    draft: str, mode: str, length: int, runs: Sequence[PromptRun], base: Sequence[PromptRun], pass_seconds: float
) -> ChainPoint:
    completions = [completion for run in runs for completion in run.completions]
    pairs = [count_verified(completion, length) for completion in completions]
    passes = sum(completion.stats.target_passes for completion in completions)
    draft_pass_seconds = sum(completion.stats.draft_time for completion in completions) / passes / length
    return ChainPoint(
        draft=draft,
        mode=mode,
        num_tokens=length,
        alpha=sum(accepted for accepted, _ in pairs) / max(1, sum(verified for _, verified in pairs)),
        cost=draft_pass_seconds / pass_seconds,
        speed_up=statistics.median(_token_seconds(b) / _token_seconds(r) for b, r in zip(base, runs, strict=True)),
        acceptance_length=sum(completion.stats.num_tokens for completion in completions) / passes,
    )


def _token_seconds(run: PromptRun) -> float:
    return run.seconds / max(1, len(run.tokens))


def make_chains(drafts: Sequence[str], lengths: Sequence[int]) -> dict[str, tuple[str, int]]:
    """Make the labels of all drafts at all lengths: label -> (draft, K)."""
    return {f"{draft}, K = {length}": (draft, length) for draft in drafts for length in lengths}


def build_chain_table(points: Sequence[ChainPoint]) -> ReportTable:
    """Build the table of all points."""
    header = ("draft", "sampling", "K", "alpha", "c", "acceptance length", "formula", "speed-up", "formula")
    rows = tuple(
        (
            p.draft, p.mode, str(p.num_tokens), f"{p.alpha:.3f}", f"{p.cost:.3f}", f"{p.acceptance_length:.2f}",
            f"{p.expected_length:.2f}", f"{p.speed_up:.2f}x", f"{p.formula:.2f}x",
        )
        for p in points
    )  # fmt: skip
    return ReportTable("Measured, and by the formula", header, rows, num_name_columns=3)
