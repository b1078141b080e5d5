"""Plots of the benchmarks, as PNG."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.bench.compare import ComparisonRow
from foredraft.bench.latency import LatencyRow
from foredraft.bench.participants import FOREDRAFT
from foredraft.bench.report import require_matplotlib
from foredraft.bench.verify_cost import VerifyCost

BASELINE_COLOR, FOREDRAFT_COLOR, PEER_COLOR = "#8a8f98", "#1f6fb2", "#d97b29"
DPI = 120  # dots per inch
CAPTION_CHARS = 98  # characters of a line of the caption, per panel
CURVE_COLORS = ("#1f6fb2", "#d97b29", "#3a8f5c", "#7a3b69", "#d14b8f", "#5b6573", "#c2a21a", "#2a9da0", "#94487f")


@dataclass(frozen=True)
class Curve:
    """Points of one panel.

    Attributes:
        label: text in the legend; "" = none.
        x: horizontal values.
        y: vertical values.
        color: index of the colour. Curves that belong together share it.
        is_reference: dashed and without markers, for a formula or a baseline.
        is_scatter: markers without a line.
        is_dotted: markers on a dotted line, for a variant of the curve with the same colour.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    color: int
    is_reference: bool = False
    is_scatter: bool = False
    is_dotted: bool = False


@dataclass(frozen=True)
class CurvePanel:
    """Axes with curves.

    Attributes:
        title: heading.
        x_label: label of the horizontal axis.
        y_label: label of the vertical axis.
        curves: curves, drawn in order.
        baseline: height of a grey horizontal line; None = none.
        ticks: values of x with a label; () = chosen by matplotlib.
        has_log_x: whether x doubles from tick to tick.
        from_zero: whether the vertical axis begins at zero.
    """

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    baseline: float | None = None
    ticks: tuple[float, ...] = ()
    has_log_x: bool = False
    from_zero: bool = True


def _create_figure(panels: int, height: float, caption: str) -> tuple[Any, list[Any]]:
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(5.2 * panels, height), layout="constrained", squeeze=False)
    figure.suptitle(caption, fontsize=8, color="#444444")
    return figure, list(axes[0])


def _save_figure(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def draw_bars(
    axis: Any, labels: Sequence[str], values: Sequence[float], notes: Sequence[str], colors: Sequence[str]
) -> None:
    """Draw horizontal bars of speeds, the first on top, each with a note at its end."""
    positions = list(range(len(labels)))
    axis.barh(positions, values, color=colors)
    axis.set_yticks(positions, labels)
    axis.invert_yaxis()
    for position, value, note in zip(positions, values, notes, strict=True):
        axis.text(value, position, f" {note}", va="center", fontsize=8)
    axis.set_xlim(0, 1.22 * max([*values, 1e-9]))
    axis.set_xlabel("tokens/s")
    axis.spines[["top", "right"]].set_visible(False)


def draw_verify_cost(axis: Any, curves: Mapping[str, Sequence[VerifyCost]]) -> None:
    """Draw the time of a pass over k tokens relative to a pass over one token, one curve per label."""
    for label, costs in curves.items():
        axis.plot([c.rows for c in costs], [c.ratio for c in costs], "o-", label=label, markersize=4)
    axis.set_xticks(sorted({c.rows for costs in curves.values() for c in costs}))
    axis.axhline(1, color=BASELINE_COLOR, linewidth=0.8)
    axis.set(xlabel="tokens in one pass", ylabel="time over a pass of one token", title="Cost of verification")
    axis.set_ylim(0, max(2.0, *(1.1 * c.ratio for costs in curves.values() for c in costs)))
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def save_latency_plot(rows: Sequence[LatencyRow], costs: Sequence[VerifyCost], caption: str, path: Path) -> None:
    """Write the plot of speed, acceptance by position and, if measured, cost of verification."""
    figure, axes = _create_figure(2 * bool(rows) + bool(costs), 3.6, caption)
    if rows:
        notes = [f"{row.tokens_per_second:.1f}  {row.speed_up:.2f}x" for row in rows]
        colors = [BASELINE_COLOR, *[FOREDRAFT_COLOR] * (len(rows) - 1)]
        draw_bars(axes[0], [row.method for row in rows], [row.tokens_per_second for row in rows], notes, colors)
        axes[0].set_title("Speed, and over plain decoding")
        for row in rows[1:]:
            axes[1].plot(range(1, len(row.per_position) + 1), row.per_position, "o-", label=row.method, markersize=4)
        axes[1].set(
            xlabel="position in the draft", ylabel="share of drafts accepted so far", ylim=(0, 1), title="Acceptance"
        )
        axes[1].xaxis.get_major_locator().set_params(integer=True)
        axes[1].spines[["top", "right"]].set_visible(False)
        if len(rows) > 1:
            axes[1].legend(fontsize=8)
    if costs:
        draw_verify_cost(axes[-1], {"foredraft": costs})
    _save_figure(figure, path)


def save_comparison_plot(
    rows: Sequence[ComparisonRow], costs: Mapping[str, Sequence[VerifyCost]], caption: str, path: Path
) -> None:
    """Write the plot of the speed of every mode of every program and, if measured, cost of verification."""
    measured_rows = [row for row in rows if row.tokens_per_second is not None]
    figure, axes = _create_figure(1 + bool(costs), max(3.6, 1.2 + 0.3 * len(measured_rows)), caption)
    labels = [f"{row.program} {row.mode} ({row.weights})" for row in measured_rows]
    speeds = [row.tokens_per_second or 0.0 for row in measured_rows]
    notes = [f"{row.tokens_per_second:.1f}" for row in measured_rows]
    draw_bars(
        axes[0],
        labels,
        speeds,
        notes,
        [FOREDRAFT_COLOR if row.program == FOREDRAFT else PEER_COLOR for row in measured_rows],
    )
    axes[0].set_title("Speed on the same weights and prompts")
    if costs:
        draw_verify_cost(axes[1], costs)
    _save_figure(figure, path)


def draw_curves(axis: Any, panel: CurvePanel) -> None:
    """Draw the curves of one panel."""
    for curve in panel.curves:
        style = "--" if curve.is_reference else "o" if curve.is_scatter else "o:" if curve.is_dotted else "o-"
        axis.plot(
            curve.x, curve.y, style, label=curve.label or "_", color=CURVE_COLORS[curve.color % len(CURVE_COLORS)],
            markersize=4, linewidth=1.1 if curve.is_reference else 1.6, alpha=0.75 if curve.is_reference else 1.0,
        )  # fmt: skip
    if panel.baseline is not None:
        axis.axhline(panel.baseline, color=BASELINE_COLOR, linewidth=0.8)
    if panel.has_log_x:
        axis.set_xscale("log", base=2)
    if panel.ticks:
        axis.set_xticks(panel.ticks, [f"{tick:g}" for tick in panel.ticks])
        axis.minorticks_off()
    if panel.from_zero:
        axis.set_ylim(bottom=0)
    axis.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axis.set_title(panel.title, fontsize=10)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    if any(curve.label for curve in panel.curves):
        axis.legend(fontsize=7.5)


def save_curves(panels: Sequence[CurvePanel], caption: str, path: Path) -> None:
    """Write a plot with one panel of curves beside the other.

    Raises:
        ForedraftError: matplotlib is not installed.
    """
    lines = [part for line in caption.splitlines() for part in textwrap.wrap(line, CAPTION_CHARS * len(panels))]
    figure, axes = _create_figure(len(panels), 3.8 + 0.12 * len(lines), "\n".join(lines))
    for axis, panel in zip(axes, panels, strict=True):
        draw_curves(axis, panel)
    _save_figure(figure, path)
