"""Source files of the CPython standard library of the running interpreter, the corpus of the built-in models.

A fixed list of modules and their tests is held out, for prompts and held-out losses.
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
# Folders of tables and generated files, which are long and contain little code.
SKIPPED_FOLDERS = frozenset("encodings pydoc_data site-packages __pycache__ cjkencodings lib2to3 distutils".split())
MIN_PROMPT_LINES = 20  # lines before the function at which a prompt ends


@dataclass(frozen=True)
class SourceFile:
    """Python file of the corpus."""

    name: str  # path below the standard library, with forward slashes
    text: str

    @property
    def is_held_out(self) -> bool:
        stems = {Path(part).stem for part in self.name.split("/")}
        return bool({stem.removeprefix("test_") for stem in stems} & HELD_OUT_MODULES)


def read_sources(root: Path | None = None) -> Iterator[SourceFile]:
    """Yield every readable Python file below `root`, by default the standard library, in a fixed order."""
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
    """Return the training files and the held-out files below `root`, by default the standard library."""
    train: list[SourceFile] = []
    held_out: list[SourceFile] = []
    for source in read_sources(root):
        (held_out if source.is_held_out else train).append(source)
    return train, held_out


def digest(files: list[SourceFile]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the names and texts, for model cards."""
    state = hashlib.sha256()
    for source in files:
        state.update(source.name.encode() + b"\0" + source.text.encode() + b"\0")
    return state.hexdigest()[:16]


def make_held_out_prompts(count: int, max_chars: int = 600, root: Path | None = None) -> list[str]:
    """Return prompts that end with the first line of a held-out function.

    Args:
        count: number of prompts, spread over the held-out files.
        max_chars: longest prompt, in characters; its beginning is removed. Default 600.
        root: folder of Python files. Default None = the standard library.
    """
    _, held_out = split(root)
    prompts_by_file: list[list[str]] = []
    for source in held_out:
        if source.name.startswith("test/"):
            continue
        lines = source.text.splitlines(keepends=True)
        starts = [i for i, line in enumerate(lines) if line.lstrip().startswith("def ") and i > MIN_PROMPT_LINES]
        prompts_by_file.append(["".join(lines[: i + 1])[-max_chars:] for i in starts])
    prompts: dict[str, None] = {}
    depth = 0
    while len(prompts) < count and depth < max(map(len, prompts_by_file)):
        # Each pass takes one prompt per file; the stride of 7 spreads the prompts over a file.
        prompts.update((file[(7 * depth + 3) % len(file)], None) for file in prompts_by_file if depth < len(file))
        depth += 1
    return list(prompts)[:count]
