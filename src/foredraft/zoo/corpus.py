"""The text the built-in models learn from: the CPython standard library of the running interpreter.

A fixed list of modules (and their tests) is held out; prompts and held-out losses come from those alone.
This file does not know about models or tokenizers.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_MODULES = frozenset(
    "bisect calendar colorsys configparser contextlib csv difflib fnmatch fractions graphlib heapq "
    "json netrc optparse pprint queue reprlib sched shlex statistics string textwrap timeit "
    "tomllib trace zipapp".split()
)
# Tables and machine-written files: long, and with nothing of the language in them.
SKIPPED_FOLDERS = frozenset("encodings pydoc_data site-packages __pycache__ cjkencodings lib2to3 distutils".split())


@dataclass(frozen=True)
class SourceFile:
    name: str  # path below the standard library, with forward slashes
    text: str

    @property
    def is_held_out(self) -> bool:
        stems = {Path(part).stem for part in self.name.split("/")}
        return bool({stem.removeprefix("test_") for stem in stems} & HELD_OUT_MODULES)


def read_sources(root: Path | None = None) -> Iterator[SourceFile]:
    """Every readable Python file of the standard library, in a fixed order."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED_FOLDERS & set(name.split("/")):
            continue
        try:
            yield SourceFile(name, path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError):
            continue


def split(root: Path | None = None) -> tuple[list[SourceFile], list[SourceFile]]:
    """(training files, held-out files)."""
    train: list[SourceFile] = []
    held: list[SourceFile] = []
    for source in read_sources(root):
        (held if source.is_held_out else train).append(source)
    return train, held


def digest(files: list[SourceFile]) -> str:
    """A fingerprint of a list of files, for the model card."""
    state = hashlib.sha256()
    for source in files:
        state.update(source.name.encode() + b"\0" + source.text.encode() + b"\0")
    return state.hexdigest()[:16]


def make_held_out_prompts(count: int, max_chars: int = 600, root: Path | None = None) -> list[str]:
    """Openings of held-out functions, each with the text before it, spread over the held-out files."""
    _, held = split(root)
    cuts: list[list[str]] = []
    for source in held:
        if source.name.startswith("test/"):
            continue
        lines = source.text.splitlines(keepends=True)
        starts = [i for i, line in enumerate(lines) if line.lstrip().startswith("def ") and i > 20]
        cuts.append(["".join(lines[: i + 1])[-max_chars:] for i in starts])
    prompts: dict[str, None] = {}
    depth = 0
    while len(prompts) < count and depth < max(map(len, cuts)):
        # every file in turn; the odd stride spreads the picks over a file
        prompts.update((file[(7 * depth + 3) % len(file)], None) for file in cuts if depth < len(file))
        depth += 1
    return list(prompts)[:count]
