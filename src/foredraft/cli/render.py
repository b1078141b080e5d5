"""Terminal output: text coloured by origin as it arrives, a legend, figures, a table.

Text goes to standard output, all else to standard error, so a pipe carries the text alone.
"""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import TextIO

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from foredraft.cli.compare import MethodRow
from foredraft.cli.tables import Grid, print_grid
from foredraft.outputs import Delta, Origin

ORIGIN_STYLES: dict[Origin, Style] = {
    "accepted": Style(color="green"),
    "corrected": Style(color="red"),
    "bonus": Style(color="cyan"),
    "plain": Style(),
}
ORIGIN_NAMES: dict[Origin, str] = {
    "accepted": "accepted draft",
    "corrected": "corrected",
    "bonus": "bonus",
    "plain": "plain",
}
DIM_STYLE = Style(dim=True)

# A model may write anything; on a terminal its control characters are shown, not obeyed.
_CONTROL_PICTURES = {c: 0x2400 + c for c in range(0x20) if chr(c) not in "\n\t"}
_CONTROL_PICTURES |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def make_console(file: TextIO, no_color: bool) -> Console:
    """A console that colours only on a terminal, and never against --no-color or NO_COLOR."""
    plain = no_color or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not file.isatty()
    return Console(
        file=file, force_terminal=file.isatty(), color_system=None if plain else "auto", highlight=False, markup=False
    )


class Screen:
    """The two streams of a command."""

    def __init__(self, no_color: bool) -> None:
        self.out = make_console(sys.stdout, no_color)
        self.err = make_console(sys.stderr, no_color)

    @property
    def is_live(self) -> bool:
        """Someone watches the text as it comes."""
        return self.out.is_terminal

    def write_text(self, pieces: Sequence[tuple[str, Style]]) -> None:
        """Text as it comes: nothing wrapped, nothing added."""
        if self.is_live:
            self.out.print(
                Segments(Segment(text.translate(_CONTROL_PICTURES), style) for text, style in pieces),
                end="",
                soft_wrap=True,
            )
        else:
            self.out.file.write("".join(text for text, _ in pieces))
        self.out.file.flush()

    def print_note(self, line: str, style: Style | None = None) -> None:
        """One line beside the text."""
        self.out.file.flush()
        self.err.print(Text(line, style or Style()), soft_wrap=True)

    def print_legend(self, counts: Counter[Origin]) -> None:
        """Print the meaning of the colours, and the number of tokens of each."""
        line = Text()
        for origin in (o for o in ORIGIN_STYLES if counts[o]):
            line.append("■ ", ORIGIN_STYLES[origin]).append(f"{ORIGIN_NAMES[origin]} {counts[origin]}  ", DIM_STYLE)
        self.err.print(line, soft_wrap=True)

    def print_table(self, rows: Sequence[MethodRow]) -> None:
        """The comparison, plain decoding first."""
        self.out.file.flush()
        header = ("method", "tokens/s", "speed-up", "acceptance length", "acceptance rate", "identical")
        cells = tuple(row.format_cells(row.figures) for row in rows if row.figures is not None)
        print_grid(self.err, Grid(header, cells))


class StreamPrinter:
    """Shows the deltas of many completions in order: the first unfinished one live, the others in turn."""

    def __init__(self, screen: Screen, prompts: Sequence[str], num_samples: int) -> None:
        self.screen = screen
        self.prompts = prompts
        self.num_samples = num_samples
        self._pending_deltas: dict[int, list[Delta]] = {}
        self._current_index = 0
        self._last_char: str = "\n"  # the last character shown

    def open(self) -> None:
        """Before the first delta."""
        self._pending_deltas = {i: [] for i in range(len(self.prompts) * self.num_samples)}
        self._print_header()

    def show(self, delta: Delta) -> None:
        self._pending_deltas[delta.index].append(delta)
        while self._current_index in self._pending_deltas:
            shown, self._pending_deltas[self._current_index] = self._pending_deltas[self._current_index], []
            for ready in shown:
                # a request that failed may still release text that no token of this delta brought
                pairs = zip_longest(ready.pieces, ready.origins, fillvalue=None)
                self._write([(piece or "", ORIGIN_STYLES[origin or "plain"]) for piece, origin in pairs])
            if not (shown and shown[-1].finish_reason):
                break
            del self._pending_deltas[self._current_index]
            self._current_index += 1
            self.close()
            if self._current_index in self._pending_deltas:
                self._print_header()

    def close(self) -> None:
        """End the line the text stopped in, so that what follows starts on its own."""
        if self._last_char != "\n":
            self._write([("\n", Style())])

    def _print_header(self) -> None:
        if not self.screen.is_live:
            return
        prompt, sample = divmod(self._current_index, self.num_samples)
        if len(self.prompts) * self.num_samples > 1:
            self._write([(f"── prompt {prompt + 1}, sample {sample + 1} ──\n", DIM_STYLE)])
        self._write([(self.prompts[prompt], DIM_STYLE)])

    def _write(self, pieces: Sequence[tuple[str, Style]]) -> None:
        written = "".join(text for text, _ in pieces)
        if written:
            self._last_char = written[-1]
            self.screen.write_text(pieces)
