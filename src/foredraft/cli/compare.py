"""Plain decoding against drafting methods: the same prompts, the same weights, in turn, medians of the runs."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foredraft.cli.backend import CliGenerator, CliPrompt
from foredraft.cli.speed_figures import SpeedFigures
from foredraft.outputs import Completion

if TYPE_CHECKING:
    from foredraft.sampling.params import Sampling

PLAIN = "plain"
WARM_UP_TOKENS = 16
IDLE_SHARE = 0.1  # share of passes with a draft, below which a method counts as not drafting


@dataclass(frozen=True)
class MethodRow:
    """One method's place in the table; figures is None for a method that could not take part, with the reason."""

    method: str
    figures: SpeedFigures | None
    speed_up: float | None = None
    first_difference: int | None = (
        None  # the first token, over all completions, that is not plain decoding's; None = identical
    )
    difference_reason: str | None = None  # why texts may differ: "sampled", or "lossy"
    verification: str = ""
    skip_reason: str = ""  # why it took no part

    def format_cells(self, figures: SpeedFigures) -> tuple[str, ...]:
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
            self._identity_text,
        )

    @property
    def is_idle(self) -> bool:
        """Hardly any pass had a draft."""
        return (
            self.figures is not None and self.figures.stats.num_drafts < IDLE_SHARE * self.figures.stats.target_passes
        )

    @property
    def _identity_text(self) -> str:
        if self.method == PLAIN:
            return ""
        if self.first_difference is None:
            return "yes"
        return f"no ({self.difference_reason})" if self.difference_reason else f"no (token {self.first_difference})"

    @property
    def json(self) -> dict[str, Any]:
        if self.figures is None:
            return {"method": self.method, "skipped": self.skip_reason}
        s = self.figures.stats
        return {
            "method": self.method,
            "tokens_per_second": self.figures.tokens_per_second,
            "speed_up": 1.0 if self.speed_up is None else self.speed_up,
            "acceptance_length": s.acceptance_length,
            "acceptance_rate": s.acceptance_rate,
            "target_passes": s.target_passes,
            "identical": self.first_difference is None,
            "excuse": self.difference_reason,
            "verification": self.verification,
        }


@dataclass(frozen=True)
class MethodRuns:
    completions: list[Completion]  # of the first run
    figures: SpeedFigures  # the run of median time


def measure(
    generators: Mapping[str, CliGenerator], prompts: Sequence[CliPrompt], sampling: "Sampling", repeats: int,
    step: Callable[[str], None],
) -> dict[str, MethodRuns]:  # fmt: skip
    """Warm every generator up, then run them in turn `repeats` times, so that a drifting clock speed favours none."""
    short = min(WARM_UP_TOKENS, sampling.max_tokens)
    brief = dataclasses.replace(sampling, max_tokens=short, min_tokens=min(short, sampling.min_tokens))
    for name, generator in generators.items():
        step(name)
        generator.generate(prompts, brief)
    runs: dict[str, list[tuple[list[Completion], SpeedFigures]]] = {name: [] for name in generators}
    for _ in range(repeats):
        for name, generator in generators.items():
            step(name)
            began = time.perf_counter()
            completions = generator.generate(prompts, sampling)
            runs[name].append((completions, SpeedFigures.from_completions(completions, time.perf_counter() - began)))
    return {
        name: MethodRuns(done[0][0], _select_median([figures for _, figures in done])) for name, done in runs.items()
    }


def _select_median(figures: Sequence[SpeedFigures]) -> SpeedFigures:
    by_speed = sorted(figures, key=lambda f: f.tokens_per_second)
    return by_speed[(len(by_speed) - 1) // 2]


def build_rows(
    runs: Mapping[str, MethodRuns], skipped: Mapping[str, str], sampling: "Sampling", lossy: frozenset[str]
) -> list[MethodRow]:
    """One row per method, plain decoding first."""
    plain = runs[PLAIN]
    rows = []
    for name, run in runs.items():
        rule = run.completions[0].verification if run.completions else ""
        is_same = name == PLAIN or plain.figures.tokens_per_second == 0
        rows.append(
            MethodRow(
                method=name,
                figures=run.figures,
                speed_up=None if is_same else run.figures.tokens_per_second / plain.figures.tokens_per_second,
                first_difference=_find_first_difference(plain.completions, run.completions),
                difference_reason=_explain_difference(rule, sampling, lossy),
                verification=rule,
            )
        )
    return [*rows, *(MethodRow(name, None, skip_reason=reason) for name, reason in skipped.items())]


def _explain_difference(rule: str, sampling: "Sampling", lossy: frozenset[str]) -> str | None:
    if rule in lossy:
        return "lossy"
    is_reproducible = sampling.is_greedy or (sampling.seed is not None and rule == "match")
    return None if is_reproducible else "sampled"


def _find_first_difference(ours: Sequence[Completion], theirs: Sequence[Completion]) -> int | None:
    offset = 0
    for a, b in zip(ours, theirs, strict=True):
        if a.token_ids != b.token_ids:
            same = zip(a.token_ids, b.token_ids, strict=False)
            return offset + next(
                (i for i, (x, y) in enumerate(same) if x != y), min(len(a.token_ids), len(b.token_ids))
            )
        offset += len(a.token_ids)
    return None


def build_notes(rows: Sequence[MethodRow]) -> list[str]:
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
        found.append(f"{row.method} was left out: {row.skip_reason}")
    if any(row.first_difference is not None and not row.difference_reason for row in rows):
        found.append(
            "A text differs from plain decoding: where two tokens are equally likely within the rounding of the dtype, "
            "one pass over many tokens may round the other way. --dtype float32 or float64 tells."
        )
    return found
