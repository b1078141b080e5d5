"""Plain decoding against drafting methods: the same prompts, the same weights, in turn, medians of the runs."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foredraft.cli.backend import CliPrompt, Generator
from foredraft.cli.figures import Figures
from foredraft.completion import Completion

if TYPE_CHECKING:
    from foredraft.sampling import Sampling

PLAIN = "plain"
WARM_UP_TOKENS = 16
IDLE = 0.1  # share of passes with a draft, below which a method counts as not drafting


@dataclass(frozen=True)
class Row:
    """One method's place in the table; figures is None for a method that could not take part, with the reason."""

    method: str
    figures: Figures | None
    speed_up: float | None = None
    differs_at: int | None = (
        None  # the first token, over all completions, that is not plain decoding's; None = identical
    )
    excuse: str | None = None  # why texts may differ: "sampled", or "lossy"
    verification: str = ""
    reason: str = ""  # why it took no part

    def cells(self, figures: Figures) -> tuple[str, ...]:
        """The row as text."""
        s = figures.stats
        rate = f"{s.acceptance_rate:.2f}" if s.num_drafted else "-"
        speed_up = f"{1.0 if self.speed_up is None else self.speed_up:.2f}x"
        return (
            self.method,
            f"{figures.tokens_per_second:.1f}",
            speed_up,
            f"{s.acceptance_length:.2f}",
            rate,
            self._verdict,
        )

    @property
    def is_idle(self) -> bool:
        """Hardly any pass had a draft."""
        return self.figures is not None and self.figures.stats.num_drafts < IDLE * self.figures.stats.target_passes

    @property
    def _verdict(self) -> str:
        if self.method == PLAIN:
            return ""
        if self.differs_at is None:
            return "yes"
        return f"no ({self.excuse})" if self.excuse else f"no (token {self.differs_at})"

    @property
    def json(self) -> dict[str, Any]:
        if self.figures is None:
            return {"method": self.method, "skipped": self.reason}
        s = self.figures.stats
        return {
            "method": self.method,
            "tokens_per_second": self.figures.tokens_per_second,
            "speed_up": 1.0 if self.speed_up is None else self.speed_up,
            "acceptance_length": s.acceptance_length,
            "acceptance_rate": s.acceptance_rate,
            "target_passes": s.target_passes,
            "identical": self.differs_at is None,
            "excuse": self.excuse,
            "verification": self.verification,
        }


@dataclass(frozen=True)
class Runs:
    completions: list[Completion]  # of the first run
    figures: Figures  # the run of median time


def measure(
    generators: Mapping[str, Generator], prompts: Sequence[CliPrompt], sampling: "Sampling", repeats: int,
    step: Callable[[str], None],
) -> dict[str, Runs]:  # fmt: skip
    """Warm every generator up, then run them in turn `repeats` times, so that a drifting clock speed favours none."""
    short = min(WARM_UP_TOKENS, sampling.max_tokens)
    brief = dataclasses.replace(sampling, max_tokens=short, min_tokens=min(short, sampling.min_tokens))
    for name, generator in generators.items():
        step(name)
        generator.generate(prompts, brief)
    runs: dict[str, list[tuple[list[Completion], Figures]]] = {name: [] for name in generators}
    for _ in range(repeats):
        for name, generator in generators.items():
            step(name)
            began = time.perf_counter()
            completions = generator.generate(prompts, sampling)
            runs[name].append((completions, Figures.of(completions, time.perf_counter() - began)))
    return {name: Runs(done[0][0], _median([figures for _, figures in done])) for name, done in runs.items()}


def _median(figures: Sequence[Figures]) -> Figures:
    by_speed = sorted(figures, key=lambda f: f.tokens_per_second)
    return by_speed[(len(by_speed) - 1) // 2]


def table(
    runs: Mapping[str, Runs], skipped: Mapping[str, str], sampling: "Sampling", lossy: frozenset[str]
) -> list[Row]:
    """One row per method, plain decoding first."""
    plain = runs[PLAIN]
    rows = []
    for name, run in runs.items():
        rule = run.completions[0].verification if run.completions else ""
        is_same = name == PLAIN or plain.figures.tokens_per_second == 0
        rows.append(
            Row(
                method=name,
                figures=run.figures,
                speed_up=None if is_same else run.figures.tokens_per_second / plain.figures.tokens_per_second,
                differs_at=_first_difference(plain.completions, run.completions),
                excuse=_excuse(rule, sampling, lossy),
                verification=rule,
            )
        )
    return [*rows, *(Row(name, None, reason=reason) for name, reason in skipped.items())]


def _excuse(rule: str, sampling: "Sampling", lossy: frozenset[str]) -> str | None:
    if rule in lossy:
        return "lossy"
    is_reproducible = sampling.is_greedy or (sampling.seed is not None and rule == "match")
    return None if is_reproducible else "sampled"


def _first_difference(ours: Sequence[Completion], theirs: Sequence[Completion]) -> int | None:
    offset = 0
    for a, b in zip(ours, theirs, strict=True):
        if a.token_ids != b.token_ids:
            same = zip(a.token_ids, b.token_ids, strict=False)
            return offset + next(
                (i for i, (x, y) in enumerate(same) if x != y), min(len(a.token_ids), len(b.token_ids))
            )
        offset += len(a.token_ids)
    return None


def notes(rows: Sequence[Row]) -> list[str]:
    """Remarks below the table: methods that did not draft or took no part, and differences that should not be."""
    found = []
    names = {row.method for row in rows}
    for row in rows:
        if (fixed := [name for name in names if name.startswith(f"{row.method}:")]) and row.is_idle:
            found.append(
                f"{row.method}: drafts do not pay here, so --spec-tokens auto makes none; {fixed[0]} always does"
            )
    skipped = [row.method for row in rows if row.figures is None]
    if len(skipped) > 1:
        found.append(f"left out: {', '.join(skipped)}; give one to --spec-method to see why")
    elif skipped:
        [row] = (row for row in rows if row.figures is None)
        found.append(f"{row.method} was left out: {row.reason}")
    if any(row.differs_at is not None and not row.excuse for row in rows):
        found.append(
            "A text differs from plain decoding: where two tokens are equally likely within the rounding of the dtype, "
            "one pass over many tokens may round the other way. --dtype float32 or float64 tells."
        )
    return found
