"""Tables fit a terminal of any width: nothing is cut."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from foredraft.bench.report import BenchReport, ReportTable
from foredraft.cli.bench import print_report
from foredraft.cli.tables import Grid, print_grid
from tests.support.cli_fakes import PIECES, FakeBackend, FakeLLM

LONGEST = "suffix+mlp_speculator"
SPEED = Grid(
    ("method", "tokens/s", "speed-up", "acceptance length", "acceptance rate", "drafting share", "target passes"),
    (
        ("plain", "31.4", "1.00x", "1.00", "0.00", "0 %", "160"),
        (LONGEST, "71.0", "2.26x", "3.01", "0.66", "98 %", "53"),
    ),
)


class LongNames(FakeBackend):
    """Methods with the longest names of one and of two words."""

    def list_choices(self):
        return replace(super().list_choices(), methods=("draft_model", "mlp_speculator", "suffix", "ngram"))


def render_grid(grid: Grid, width: int) -> str:
    file = io.StringIO()
    print_grid(Console(file=file, width=width, force_terminal=True, color_system=None), grid)
    return file.getvalue()


def words(text: str) -> set[str]:
    return set(re.sub(r"[│┃┏┓┗┛┡┩└┘├┤━─┳┴╇┼]", " ", text).split())


@pytest.mark.parametrize("method", ["mlp_speculator", LONGEST])
def test_the_comparison_fits_80_columns_with_the_longest_names(run_on_terminal, method):
    pieces = (*PIECES[:3], (" x", "bonus"))  # not plain decoding's text: the widest cell of the last column
    backend = LongNames({method: FakeLLM("x", pieces=pieces)})
    args = ("generate", "p", "--compare", "--no-color", "--spec-method", f"{method},draft_model", "--repeats", "1")
    shown = run_on_terminal(*args, backend=backend, COLUMNS="80").stdout
    lines = shown.splitlines()
    first = next(i for i, line in enumerate(lines) if "acceptance" in line)
    last = max(i for i, line in enumerate(lines) if "no (token 4)" in line)
    table = "\n".join(lines[first : last + 1])
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "…" not in table
    [row] = [line for line in table.splitlines() if method in line]
    assert "no (token 4)" in row
    assert {"acceptance", "length", "rate", "identical", "speed-up"} <= words(table)


def test_a_wide_terminal_shows_headers_on_one_line_in_a_box():
    lines = render_grid(SPEED, 140).splitlines()
    assert re.search(r"method .* acceptance length .* target passes ┃$", lines[1])
    assert len(lines) == 3 + 2 + 1


def test_narrower_ones_give_up_the_width_of_headers_then_the_box_then_columns():
    assert "acceptance ┃ acceptance" in render_grid(SPEED, 101)
    boxless = render_grid(SPEED, 90)
    assert "┃" not in boxless
    assert boxless.count(LONGEST) == 1
    assert render_grid(SPEED, 60).count(LONGEST) == 2


@pytest.mark.parametrize("width", range(34, 130, 5))
def test_every_word_is_printed_whole_at_every_width(width):
    shown = render_grid(SPEED, width)
    assert all(len(line) <= width for line in shown.splitlines())
    expected = {word for cell in (*SPEED.header, *sum(SPEED.rows, ())) for word in cell.split()}
    assert words(shown) == expected


def test_a_cell_wider_than_the_terminal_goes_on_in_the_next_line():
    shown = render_grid(Grid(("method", "why"), (("ngram", "x" * 50),)), 30)
    assert all(len(line) <= 30 for line in shown.splitlines())
    assert shown.count("x") == 50


def test_tables_of_benchmarks_fit_80_columns_too():
    names = tuple(f"{LONGEST}:{length}" for length in range(1, 9))
    table = ReportTable("By category", ("category", "prompts", *names), (("code", "12", *["1.23x (2.34)"] * 8),))
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    print_report(BenchReport("Latency", ("a note",), (table,), {}), console)
    shown = file.getvalue()
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert set(names) <= words(shown)
    assert "· a note" in shown
