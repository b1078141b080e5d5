"""What a person sees: text coloured by origin as it comes, a legend, figures, a table.

Text goes to standard output, all else to standard error, so that a pipe carries the text alone.
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

from foredraft.cli.compare import Row
from foredraft.cli.tables import Grid, print_grid
from foredraft.completion import Delta, Origin

STYLES: dict[Origin, Style] = {
    "accepted": Style(color="green"),
    "corrected": Style(color="red"),
    "bonus": Style(color="cyan"),
    "plain": Style(),
}
NAMES: dict[Origin, str] = {"accepted": "accepted draft", "corrected": "corrected", "bonus": "bonus", "plain": "plain"}
DIM = Style(dim=True)

# A model may write anything; on a terminal its control characters are shown, not obeyed.
_HARMLESS = {c: 0x2400 + c for c in range(0x20) if chr(c) not in "\n\t"}
_HARMLESS |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def console(file: TextIO, no_color: bool) -> Console:
    """A console that colours only on a terminal, and never against --no-color or NO_COLOR."""
    plain = no_color or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not file.isatty()
    return Console(
        file=file, force_terminal=file.isatty(), color_system=None if plain else "auto", highlight=False, markup=False
    )


class Screen:
    """The two streams of a command."""

    def __init__(self, no_color: bool) -> None:
        self.out = console(sys.stdout, no_color)
        self.err = console(sys.stderr, no_color)

    @property
    def is_live(self) -> bool:
        """Someone watches the text as it comes."""
        return self.out.is_terminal

    def text(self, pieces: Sequence[tuple[str, Style]]) -> None:
        """Text as it comes: nothing wrapped, nothing added."""
        if self.is_live:
            self.out.print(
                Segments(Segment(text.translate(_HARMLESS), style) for text, style in pieces), end="", soft_wrap=True
            )
        else:
            self.out.file.write("".join(text for text, _ in pieces))
        self.out.file.flush()

    def note(self, line: str, style: Style | None = None) -> None:
        """One line beside the text."""
        self.out.file.flush()
        self.err.print(Text(line, style or Style()), soft_wrap=True)

    def legend(self, counts: Counter[Origin]) -> None:
        """What the colours mean, and how many tokens of each there were."""
        line = Text()
        for origin in (o for o in STYLES if counts[o]):
            line.append("■ ", STYLES[origin]).append(f"{NAMES[origin]} {counts[origin]}  ", DIM)
        self.err.print(line, soft_wrap=True)

    def table(self, rows: Sequence[Row]) -> None:
        """The comparison, plain decoding first."""
        self.out.file.flush()
        header = ("method", "tokens/s", "speed-up", "acceptance length", "acceptance rate", "identical")
        cells = tuple(row.cells(row.figures) for row in rows if row.figures is not None)
        print_grid(self.err, Grid(header, cells))


class Reel:
    """Shows the deltas of many completions in order: the first unfinished one live, the others in turn."""

    def __init__(self, screen: Screen, prompts: Sequence[str], samples: int) -> None:
        self.screen = screen
        self.prompts = prompts
        self.samples = samples
        self._waiting: dict[int, list[Delta]] = {}
        self._turn = 0
        self._column: str = "\n"  # the last character shown

    def open(self) -> None:
        """Before the first delta."""
        self._waiting = {i: [] for i in range(len(self.prompts) * self.samples)}
        self._begin()

    def show(self, delta: Delta) -> None:
        self._waiting[delta.index].append(delta)
        while self._turn in self._waiting:
            shown, self._waiting[self._turn] = self._waiting[self._turn], []
            for ready in shown:
                # a request that failed may still release text that no token of this delta brought
                pairs = zip_longest(ready.pieces, ready.origins, fillvalue=None)
                self._put([(piece or "", STYLES[origin or "plain"]) for piece, origin in pairs])
            if not (shown and shown[-1].finish_reason):
                break
            del self._waiting[self._turn]
            self._turn += 1
            self.close()
            if self._turn in self._waiting:
                self._begin()

    def close(self) -> None:
        """End the line the text stopped in, so that what follows starts on its own."""
        if self._column != "\n":
            self._put([("\n", Style())])

    def _begin(self) -> None:
        if not self.screen.is_live:
            return
        prompt, sample = divmod(self._turn, self.samples)
        if len(self.prompts) * self.samples > 1:
            self._put([(f"── prompt {prompt + 1}, sample {sample + 1} ──\n", DIM)])
        self._put([(self.prompts[prompt], DIM)])

    def _put(self, pieces: Sequence[tuple[str, Style]]) -> None:
        written = "".join(text for text, _ in pieces)
        if written:
            self._column = written[-1]
            self.screen.text(pieces)
