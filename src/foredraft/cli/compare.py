"""Comparison of drafting methods with plain decoding for `foredraft generate --compare`.

All methods decode the same prompts with the same weights, in turn. The figures are those of the run of median speed.
"""

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
    from foredraft.verification.rule import Rule

PLAIN = "plain"  # name of plain decoding in the table
WARM_UP_TOKENS = 16  # output tokens of the warm-up of a method
IDLE_SHARE = 0.1  # a method is idle if fewer than this share of its target passes have a draft


@dataclass(frozen=True)
class MethodRow:
    """Row of a method in the table; `figures` is None for a method that could not be measured."""

    method: str
    figures: SpeedFigures | None
    speed_up: float | None = None
    # index over the tokens of all completions of the first that differs from plain decoding; None = identical
    first_difference: int | None = None
    difference_reason: str | None = None  # expected reason of a difference: "sampled" or "lossy"
    verification: str = ""
    skip_reason: str = ""  # error message if the method could not be measured

    def format_cells(self, figures: SpeedFigures) -> tuple[str, ...]:
        """Return the cells of the row as text."""
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
        """Whether fewer than `IDLE_SHARE` of the target passes had a draft."""
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
    """Result of the timed runs of a method."""

    completions: list[Completion]  # of the first run
    figures: SpeedFigures  # of the run of median speed


def measure(
    generators: Mapping[str, CliGenerator], prompts: Sequence[CliPrompt], sampling: "Sampling", repeats: int,
    step: Callable[[str], None],
) -> dict[str, MethodRuns]:  # fmt: skip
    """Warm up all generators, then run them in turn `repeats` times.

    The generators alternate, so that a drift of the CPU frequency favours none of them.

    Args:
        generators: generators by method name.
        prompts: prompts of every run.
        sampling: sampling parameters of every run.
        repeats: timed runs of each generator.
        step: called with the method name before each run.

    Returns:
        The result of each generator by method name.
    """
    max_tokens = min(WARM_UP_TOKENS, sampling.max_tokens)
    warm_up = dataclasses.replace(sampling, max_tokens=max_tokens, min_tokens=min(max_tokens, sampling.min_tokens))
    for name, generator in generators.items():
        step(name)
        generator.generate(prompts, warm_up)
    runs: dict[str, list[tuple[list[Completion], SpeedFigures]]] = {name: [] for name in generators}
    for _ in range(repeats):
        for name, generator in generators.items():
            step(name)
            began = time.perf_counter()
            completions = generator.generate(prompts, sampling)
            runs[name].append((completions, SpeedFigures.from_completions(completions, time.perf_counter() - began)))
    return {
        name: MethodRuns(results[0][0], _select_median([figures for _, figures in results]))
        for name, results in runs.items()
    }


def _select_median(figures: Sequence[SpeedFigures]) -> SpeedFigures:
    by_speed = sorted(figures, key=lambda f: f.tokens_per_second)
    return by_speed[(len(by_speed) - 1) // 2]


def build_rows(
    runs: Mapping[str, MethodRuns], skipped: Mapping[str, str], sampling: "Sampling", rules: Mapping[str, "Rule"]
) -> list[MethodRow]:
    """Return one row per method: the measured ones in order, plain decoding first, then the skipped ones.

    Args:
        runs: measured runs by method; `PLAIN` is the baseline.
        skipped: error message of each method that could not be measured.
        sampling: sampling parameters of the runs.
        rules: verification rules by name.
    """
    plain = runs[PLAIN]
    rows = []
    for name, run in runs.items():
        rule_name = run.completions[0].verification
        has_no_ratio = name == PLAIN or plain.figures.tokens_per_second == 0
        rows.append(
            MethodRow(
                method=name,
                figures=run.figures,
                speed_up=None if has_no_ratio else run.figures.tokens_per_second / plain.figures.tokens_per_second,
                first_difference=_find_first_difference(plain.completions, run.completions),
                difference_reason=_explain_difference(rules.get(rule_name), sampling),
                verification=rule_name,
            )
        )
    return [*rows, *(MethodRow(name, None, skip_reason=reason) for name, reason in skipped.items())]


def _explain_difference(rule: "Rule | None", sampling: "Sampling") -> str | None:
    """Return why an output may differ from plain decoding; None if it must be identical.

    A rule that is in no list (None), such as simulated acceptance, counts as lossy.
    """
    if rule is None or not rule.is_lossless:
        return "lossy"
    is_reproducible = sampling.is_greedy or (sampling.seed is not None and rule.is_reproducible)
    return None if is_reproducible else "sampled"


def _find_first_difference(expected: Sequence[Completion], actual: Sequence[Completion]) -> int | None:
    offset = 0
    for a, b in zip(expected, actual, strict=True):
        if a.token_ids != b.token_ids:
            pairs = zip(a.token_ids, b.token_ids, strict=False)
            return offset + next(
                (i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.token_ids), len(b.token_ids))
            )
        offset += len(a.token_ids)
    return None


def build_notes(rows: Sequence[MethodRow]) -> list[str]:
    """Return the notes below the table: methods that did not draft or were skipped, and unexpected differences."""
    notes = []
    names = {row.method for row in rows}
    for row in rows:
        if (fixed := [name for name in names if name.startswith(f"{row.method}:")]) and row.is_idle:
            notes.append(
                f"{row.method}: drafts do not pay here, so --spec-tokens auto drafts nothing; {fixed[0]} always drafts"
            )
    skipped = [row.method for row in rows if row.figures is None]
    if len(skipped) > 1:
        notes.append(f"left out: {', '.join(skipped)}; give one to --spec-method to see why")
    elif skipped:
        [row] = (row for row in rows if row.figures is None)
        notes.append(f"{row.method} was left out: {row.skip_reason}")
    if any(row.first_difference is not None and not row.difference_reason for row in rows):
        notes.append(
            "An output differs from plain decoding. If two tokens are equally likely within the rounding of the dtype, "
            "a pass over many tokens may round to the other one. Check with --dtype float32 or float64."
        )
    return notes
