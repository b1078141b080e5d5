"""Plot of throughput over load, relative to plain decoding. It shows from which load a fixed draft length loses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foredraft.bench.load import AUTO, OFF, LoadPoint
from foredraft.bench.plot import BASELINE_COLOR, DPI, FOREDRAFT_COLOR, PEER_COLOR
from foredraft.bench.report import require_matplotlib

SUBPLOT_OPTIONS: dict[str, Any] = {"layout": "constrained", "squeeze": False}
Panel = tuple[str, Sequence[LoadPoint]]  # title and points


def save_load_plot(panels: Sequence[Panel], caption: str, path: Path) -> None:
    """Write a plot with one panel per model as PNG.

    Raises:
        ForedraftError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(6.0 * len(panels), 4.4), **SUBPLOT_OPTIONS)
    figure.suptitle(caption, fontsize=8, color="#444444")
    for axis, (title, points) in zip(axes[0], panels, strict=True):
        _draw_panel(axis, title, points)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def _draw_panel(axis: Any, title: str, points: Sequence[LoadPoint]) -> None:
    modes = list(dict.fromkeys(cell.mode for point in points for cell in point.cells if cell.mode != OFF))
    complete_modes = [mode for mode in modes if all(point.find_cell(mode) is not None for point in points)]
    colors = iter([PEER_COLOR, "#b0533c", "#7a3b69"] * len(modes))
    for mode in modes:
        cells = [cell for point in points if (cell := point.find_cell(mode)) is not None]
        x, y = [cell.concurrency for cell in cells], [cell.over_off for cell in cells]
        if mode == AUTO:
            style: dict[str, Any] = {"color": FOREDRAFT_COLOR, "linewidth": 2.2, "marker": "o", "zorder": 3}
        elif mode in complete_modes:
            style = {"color": next(colors), "linewidth": 1.6, "marker": "s"}
        else:
            style = {"linewidth": 0.7, "marker": ".", "alpha": 0.8}
        axis.plot(x, y, label=mode if mode == AUTO else f"K = {mode}", markersize=4, **style)
        if mode == AUTO or mode in complete_modes:
            low, high = [min(c.over_off_rounds) for c in cells], [max(c.over_off_rounds) for c in cells]
            axis.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axis.axhline(1, color=BASELINE_COLOR, linewidth=0.8)
    counts = [point.concurrency for point in points]
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xlabel("streams at once")
    axis.set_ylabel("tokens/s over no speculation")
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
