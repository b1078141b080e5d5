"""Report of a benchmark: notes, tables and figures, and the files to which they are written."""

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from foredraft.bench.grow import read_origin
from foredraft.errors import ForedraftError, format_install_command

INSTALL_COMMAND = format_install_command("bench")
NUM_CAPTION_NOTES = 3  # first notes of a report, which become the caption of its plot


@dataclass(frozen=True)
class ReportTable:
    """Table whose first columns name the row; the other columns hold figures."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_name_columns: int = 1  # columns of names

    @property
    def markdown(self) -> str:
        cells = [
            self.header,
            ("---" if i < self.num_name_columns else "---:" for i in range(len(self.header))),
            *self.rows,
        ]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


@dataclass(frozen=True)
class BenchReport:
    """Report of one run of a benchmark, as Markdown and as JSON."""

    title: str
    notes: tuple[str, ...]  # conditions of the measurement
    tables: tuple[ReportTable, ...]
    data: dict[str, Any]  # figures for JSON; dataclasses become objects

    @property
    def markdown(self) -> str:
        parts = [f"# {self.title}", "\n".join(f"- {note}" for note in self.notes)]
        for table in self.tables:
            parts += [f"## {table.title}", table.markdown]
        return "\n\n".join(parts) + "\n"

    @property
    def json(self) -> str:
        values = {"title": self.title, "notes": self.notes, **self.data}
        return json.dumps(values, indent=1, default=_to_json_object, ensure_ascii=False) + "\n"


def _to_json_object(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


@dataclass(frozen=True)
class ReportOutputs:
    """Output files of a report; None = not written."""

    json: Path | None = None
    markdown: Path | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Check before a long measurement that all files can be written afterwards.

        Raises:
            ForedraftError: a file cannot be written, or matplotlib is missing for a plot.
        """
        for option, path in (("--json", self.json), ("--markdown", self.markdown), ("--plot", self.plot)):
            if path is None:
                continue
            if path.is_dir():
                raise ForedraftError(f"{option} {str(path)!r} is a folder; give a file")
            if not path.parent.is_dir():
                raise ForedraftError(
                    f"{option} {str(path)!r}: there is no folder {str(path.parent)!r}; create it first"
                )
            _check_writable(path, option)
        if self.plot is not None:
            if self.plot.suffix != ".png":
                raise ForedraftError(f"--plot {str(self.plot)!r}: plots are PNG; give a name that ends in .png")
            require_matplotlib()

    def write(self, report: BenchReport, save_plot: Callable[[Path], None]) -> None:
        if self.json is not None:
            self.json.write_text(report.json, encoding="utf-8")
        if self.markdown is not None:
            self.markdown.write_text(report.markdown, encoding="utf-8")
        if self.plot is not None:
            save_plot(self.plot)


def _check_writable(path: Path, option: str) -> None:
    """Open a file for writing and restore the previous state, because permissions alone are not decisive."""
    is_existing = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ForedraftError(
            f"{option} {str(path)!r} cannot be written ({error.strerror}); give another path"
        ) from None
    if not is_existing:
        path.unlink()


def require_matplotlib() -> None:
    """Check that matplotlib can be imported.

    Raises:
        ForedraftError: matplotlib is not installed; the message has the command.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ForedraftError(f"plots need matplotlib; run {INSTALL_COMMAND}") from None


def describe_machine() -> dict[str, Any]:
    """Describe the machine and versions that the figures depend on."""
    import torch
    import transformers

    import foredraft
    from foredraft.kernels.cpu.features import read_cpu_features

    return {
        "foredraft": foredraft.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": read_cpu_name(),
        "cpu_features": read_cpu_features(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def read_cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Read the model name of the processor."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def format_machine_note(facts: dict[str, Any]) -> str:
    """Format the facts of `describe_machine` as a note."""
    features = f" ({' '.join(facts['cpu_features'])})" if facts["cpu_features"] else ""
    return (
        f"{format_count(facts['threads'], 'thread')} on {format_count(facts['cores'], 'core')} of "
        f"{facts['cpu']}{features}; foredraft {facts['foredraft']}, torch {facts['torch']}, "
        f"transformers {facts['transformers']}"
    )


def get_model_name(llm: Any) -> str:
    """Return the name of the target; for a folder the last part of its path."""
    name = str(llm.target.name)
    return "built-in" if llm.is_builtin else Path(name).name if Path(name).is_dir() else name


def describe_model(name: str, config: Any, dtype: str) -> dict[str, Any]:
    """Describe the target for the JSON report."""
    return {"name": name, "dtype": dtype, "grown_from": read_origin(config)}


def list_origin_notes(config: Any) -> list[str]:
    """Return a note with the origin of a grown model; empty for an ordinary model."""
    origin = read_origin(config)
    if origin is None:
        return []
    return [f"the target is a grown model: the text, and so the acceptance, of {origin}, at the cost of its size"]


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun, as "1 thread" or "2 threads"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_percent(share: float) -> str:
    """Format a share as whole percent."""
    return f"{share:.0%}"


def format_rates(rates: Sequence[float]) -> tuple[str, ...]:
    """Format rates with two decimals."""
    return tuple(f"{rate:.2f}" for rate in rates)
