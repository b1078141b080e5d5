"""Terminal output: streamed text coloured by the origin of its tokens, legend, figures and tables.

Generated text goes to standard output, everything else to standard error, so that a pipe receives the text only.
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

# Generated text may contain control characters. A terminal gets visible replacements, so that it does not execute them.
_CONTROL_PICTURES = {c: 0x2400 + c for c in range(0x20) if chr(c) not in "\n\t"}
_CONTROL_PICTURES |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def make_console(file: TextIO, no_color: bool) -> Console:
    """Return a console with colours if `file` is a terminal and neither --no-color nor NO_COLOR forbids them."""
    plain = no_color or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not file.isatty()
    return Console(
        file=file, force_terminal=file.isatty(), color_system=None if plain else "auto", highlight=False, markup=False
    )


class Screen:
    """Standard output and standard error of a command."""

    def __init__(self, no_color: bool) -> None:
        self.out = make_console(sys.stdout, no_color)
        self.err = make_console(sys.stderr, no_color)

    @property
    def is_live(self) -> bool:
        """Whether standard output is a terminal."""
        return self.out.is_terminal

    def write_text(self, pieces: Sequence[tuple[str, Style]]) -> None:
        """Write pieces of generated text, without wrapping and without added characters."""
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
        """Print one line on standard error."""
        self.out.file.flush()
        self.err.print(Text(line, style or Style()), soft_wrap=True)

    def print_legend(self, counts: Counter[Origin]) -> None:
        """Print the meaning of each colour and its number of tokens."""
        line = Text()
        for origin in (o for o in ORIGIN_STYLES if counts[o]):
            line.append("■ ", ORIGIN_STYLES[origin]).append(f"{ORIGIN_NAMES[origin]} {counts[origin]}  ", DIM_STYLE)
        self.err.print(line, soft_wrap=True)

    def print_table(self, rows: Sequence[MethodRow]) -> None:
        """Print the table of a comparison, without the methods that could not be measured."""
        self.out.file.flush()
        header = ("method", "tokens/s", "speed-up", "acceptance length", "acceptance rate", "identical")
        cells = tuple(row.format_cells(row.figures) for row in rows if row.figures is not None)
        print_grid(self.err, Grid(header, cells))


class StreamPrinter:
    """Printer of the deltas of several completions, in the order of the completions.

    The first unfinished completion is printed as its deltas arrive; deltas of later ones wait for their turn.

    Args:
        screen: where to print.
        prompts: prompts of the completions.
        num_samples: completions per prompt.
    """

    def __init__(self, screen: Screen, prompts: Sequence[str], num_samples: int) -> None:
        self.screen = screen
        self.prompts = prompts
        self.num_samples = num_samples
        self._pending_deltas: dict[int, list[Delta]] = {}
        self._current_index = 0
        self._last_char: str = "\n"  # last character printed

    def open(self) -> None:
        """Print the header of the first completion; call before the first delta."""
        self._pending_deltas = {i: [] for i in range(len(self.prompts) * self.num_samples)}
        self._print_header()

    def show(self, delta: Delta) -> None:
        self._pending_deltas[delta.index].append(delta)
        while self._current_index in self._pending_deltas:
            ready, self._pending_deltas[self._current_index] = self._pending_deltas[self._current_index], []
            for current in ready:
                # A failed request may release held-back text: then the delta has more pieces than tokens.
                pairs = zip_longest(current.pieces, current.origins, fillvalue=None)
                self._write([(piece or "", ORIGIN_STYLES[origin or "plain"]) for piece, origin in pairs])
            if not (ready and ready[-1].finish_reason):
                break
            del self._pending_deltas[self._current_index]
            self._current_index += 1
            self.close()
            if self._current_index in self._pending_deltas:
                self._print_header()

    def close(self) -> None:
        """End the current line, so that the next output starts on a new one."""
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
