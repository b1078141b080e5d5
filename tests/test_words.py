"""Words of the field: no private words, no participles as function names, no class name defined twice.

docs/glossary.md has the words that are used instead.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "foredraft").rglob("*.py"))
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
NATIVE = sorted(p for p in (ROOT / "src" / "foredraft").rglob("*") if p.suffix in (".c", ".h"))
PAGES = sorted(p for p in (ROOT / "src" / "foredraft" / "server" / "static").rglob("*") if p.suffix in (".js", ".html"))
DOCUMENTS = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))])
ALL = [*SOURCES, *SCRIPTS, *TESTS, *NATIVE, *PAGES, *DOCUMENTS]

# Word -> the field's word.
PRIVATE = {
    "law": "distribution, probabilities",
    "laws": "distributions",
    "coin": "uniform random number",
    "coins": "uniform random numbers",
    "purse": "time credit",
    "nobody": "no request, no caller",
    "everybody": "all requests",
    "anybody": "any caller",
    "whoever": "the caller that",
    "told": "notified, given",
    "probation": "backoff",
    "witness": "snapshot",
    "overlay": "fallback",
}
IRREGULAR = (
    "kept told made found given drawn known seen held grown shown taken begun written driven chosen spent met "
    "built sent "
    "bare spelt learnt stood"
).split()
NOT_PARTICIPLES = ("embed", "feed", "seed", "need", "speed", "exceed", "proceed", "shed")
# Names from elsewhere: an operator of the field, and a method of uvicorn that is overridden.
FOREIGN = frozenset({"paged_attention", "_unsupported_upgrade_warning"})
WORD_LISTS = frozenset({"test_words.py", "test_docs.py"})  # hold the words that they look for
REPEATED_CLASSES = frozenset({"Config", "TrainConfig"})
OPENINGS = ("What", "Who", "Whose", "Where", "Of", "By", "To", "In")
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def words(text: str) -> Iterator[str]:
    """Yield the words of prose and identifiers: `draftLaw`, `draft_law` and `draft law` each hold `law`."""
    yield from (word.lower() for word in WORD.findall(text))


def find_private(text: str) -> list[str]:
    return [
        f"{number}: {word}"
        for number, line in enumerate(text.splitlines(), 1)
        for word in words(line)
        if word in PRIVATE
    ]


def is_participle(name: str) -> bool:
    first = name.strip("_").split("_")[0]
    if first in NOT_PARTICIPLES or name in FOREIGN:
        return False
    return first in IRREGULAR or (first.endswith("ed") and len(first) > 3)


def find_participles(text: str) -> list[str]:
    """Find functions named by a participle; properties and fixtures may be named by nouns or adjectives."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_participle(node.name):
            decorators = {ast.unparse(d).split(".")[-1].split("(")[0] for d in node.decorator_list}
            if not decorators & {"property", "cached_property", "setter", "lazy", "fixture"}:
                found.append(f"{node.lineno}: {node.name}")
    return found


def find_openings(text: str) -> list[str]:
    """Find docstrings that begin with a word such as `What` or `Of` instead of a verb or a noun."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node) or ""
            first = doc.split()[0].strip(",.:") if doc.split() else ""
            if first in OPENINGS:
                found.append(f"{getattr(node, 'lineno', 1)}: {first}")
    return found


def class_homes(paths: list[Path]) -> dict[str, list[str]]:
    homes = defaultdict(list)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.name)
    return homes


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [p for p in ALL if p.name not in WORD_LISTS], ids=relative)
def test_no_private_words(path: Path) -> None:
    found = find_private(path.read_text(encoding="utf-8"))
    assert not found, f"{relative(path)}: {found}; use {PRIVATE}"


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS, *TESTS], ids=relative)
def test_functions_are_verbs(path: Path) -> None:
    assert not find_participles(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS, *TESTS], ids=relative)
def test_docstrings_begin_with_a_verb_or_a_noun(path: Path) -> None:
    assert not find_openings(path.read_text(encoding="utf-8"))


def test_no_class_name_is_defined_twice() -> None:
    twice = {name: homes for name, homes in class_homes(SOURCES).items() if len(homes) > 1}
    assert not {name: homes for name, homes in twice.items() if name not in REPEATED_CLASSES}


def test_the_checks_bite(tmp_path: Path) -> None:
    """Each check finds a seeded offence."""
    assert find_private("x = draft_law  # a coin\n") == ["1: law", "1: coin"]
    assert find_private("lawful lawn coinage DraftLaw") == ["1: law"]
    assert find_participles("def drafted(): ...\ndef _kept_rows(): ...\ndef embed(): ...\n") == [
        "1: drafted",
        "2: _kept_rows",
    ]
    assert find_participles("class A:\n    @property\n    def computed(self): ...\n") == []
    assert find_openings('"""What it is."""\ndef f():\n    """Of one request."""\n') == ["1: What", "2: Of"]
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("class Job: ...\n")
    assert class_homes(sorted(tmp_path.iterdir()))["Job"] == ["a.py", "b.py"]
