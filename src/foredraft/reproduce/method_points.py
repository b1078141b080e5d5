"""Rows, tables and curves of methods that are measured beside plain decoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foredraft.bench.latency import LatencyRow
from foredraft.bench.methods import PLAIN
from foredraft.bench.plot import Curve, CurvePanel
from foredraft.bench.report import ReportTable, format_percent


@dataclass(frozen=True)
class MethodPoint:
    """Figures of one setting of one series."""

    series: str  # method, target or other group; one curve
    mode: str  # sampling
    x: float  # place on the horizontal axis
    label: str  # setting as in `foredraft bench latency --methods`
    speed_up: float  # median over prompts
    acceptance_length: float  # tokens per pass of the target, bonus token included
    draft_share: float  # time in the drafter over wall time
    agreement: str  # outputs equal to plain decoding
    verification: str  # name of the rule


def build_method_points(
    rows: Sequence[LatencyRow], places: Mapping[str, tuple[str, float]], mode: str
) -> list[MethodPoint]:
    """Build the points of a run.

    Args:
        rows: rows of the run; plain decoding has none here.
        places: label -> (series, x).
        mode: name of the sampling.
    """
    return [
        MethodPoint(
            places[row.method][0],
            mode,
            places[row.method][1],
            row.method,
            row.speed_up,
            row.acceptance_length,
            row.draft_share,
            row.agreement,
            row.verification,
        )
        for row in rows
        if row.method != PLAIN
    ]


def build_method_table(points: Sequence[MethodPoint], x_title: str, has_series: bool = True) -> ReportTable:
    """Build the table of all points, one row each.

    Args:
        points: figures.
        x_title: heading of the column of `MethodPoint.x`.
        has_series: whether the series has a column.
    """
    header = (
        *(("series",) if has_series else ()), x_title, "sampling", "rule", "acceptance length", "speed-up", "drafting",
        "text equal to plain",
    )  # fmt: skip
    rows = tuple(
        (
            *((p.series,) if has_series else ()), f"{p.x:g}", p.mode, p.verification, f"{p.acceptance_length:.2f}",
            f"{p.speed_up:.2f}x", format_percent(p.draft_share), p.agreement,
        )
        for p in points
    )  # fmt: skip
    return ReportTable("Every setting", header, rows, num_name_columns=3 + has_series)


def draw_series(
    points: Sequence[MethodPoint], x_label: str, ticks: Sequence[float] = (), has_log_x: bool = False
) -> tuple[CurvePanel, ...]:
    """Draw acceptance length and speed-up of every series and mode."""
    series_names = list(dict.fromkeys(p.series for p in points))
    lengths, speeds = [], []
    for series, mode in dict.fromkeys((p.series, p.mode) for p in points):
        color, is_dotted = series_names.index(series), mode != points[0].mode
        group = [p for p in points if (p.series, p.mode) == (series, mode)]
        x = tuple(p.x for p in group)
        lengths.append(
            Curve(f"{series}, {mode}", x, tuple(p.acceptance_length for p in group), color, is_dotted=is_dotted)
        )
        speeds.append(Curve("", x, tuple(p.speed_up for p in group), color, is_dotted=is_dotted))
    return (
        CurvePanel(
            "Acceptance length", x_label, "tokens per target pass", tuple(lengths), 1.0, tuple(ticks), has_log_x
        ),
        CurvePanel("Speed-up", x_label, "over plain decoding", tuple(speeds), 1.0, tuple(ticks), has_log_x),
    )


def find_best(points: Sequence[MethodPoint], series: str, mode: str) -> MethodPoint:
    """Find the fastest point of a series in a mode."""
    return max((p for p in points if (p.series, p.mode) == (series, mode)), key=lambda p: p.speed_up)
