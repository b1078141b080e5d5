"""Tables that fit the width of a terminal.

A table that is too wide gets headers of two lines, then loses its box, and is finally split into several tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

UNBOUNDED_WIDTH = 10_000  # characters; width at which a table is measured


@dataclass(frozen=True)
class Grid:
    """Header and cells of a table.

    The first `num_name_columns` columns name the row and are aligned left; the others are figures, aligned right.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_name_columns: int = 1
    title: str | None = None

    def select_columns(self, columns: Sequence[int]) -> "Grid":
        rows = tuple(tuple(row[i] for i in columns) for row in self.rows)
        return Grid(tuple(self.header[i] for i in columns), rows, self.num_name_columns, self.title)

    def break_headers(self) -> "Grid":
        """Return a copy whose headers have two lines."""
        return Grid(tuple(map(_break_name, self.header)), self.rows, self.num_name_columns, self.title)

    def build_table(self, frame: box.Box | None) -> Table:
        table = Table(
            title=self.title,
            title_justify="left",
            header_style=Style(bold=True),
            box=frame,
            padding=(0, 1) if frame else (0, 2, 0, 0),
            pad_edge=frame is not None,
        )
        for number, name in enumerate(self.header):
            justify: Literal["left", "right"] = "left" if number < self.num_name_columns else "right"
            table.add_column(Text(name), justify=justify, vertical="bottom", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return table


def print_grid(console: Console, grid: Grid) -> None:
    """Print a table in the widest form that fits the console; no column and no cell is truncated."""
    narrow = grid.break_headers()
    for table in (grid.build_table(box.HEAVY_HEAD), narrow.build_table(box.HEAVY_HEAD), narrow.build_table(None)):
        if _fits(console, table):
            console.print(table)
            return
    for columns in _split_columns(console, narrow):
        console.print(narrow.select_columns(columns).build_table(None))


def _split_columns(console: Console, grid: Grid) -> list[list[int]]:
    """Return the column numbers of each table of a split; every table begins with the name columns."""
    names = list(range(grid.num_name_columns))
    parts = [list(names)]
    for column in range(grid.num_name_columns, len(grid.header)):
        wider = [*parts[-1], column]
        if len(wider) > grid.num_name_columns + 1 and not _fits(console, grid.select_columns(wider).build_table(None)):
            wider = [*names, column]
            parts.append(wider)
        parts[-1] = wider
    return parts


def _fits(console: Console, table: Table) -> bool:
    return console.measure(table, options=console.options.update(width=UNBOUNDED_WIDTH)).maximum <= console.width


def _break_name(name: str) -> str:
    """Break a header into two lines at the space that gives the smallest width."""
    words = name.split(" ")
    breaks = [(" ".join(words[:i]), " ".join(words[i:])) for i in range(1, len(words))]
    return "\n".join(min(breaks, key=lambda lines: max(map(len, lines)))) if breaks else name
