"""Abilities of a drafter, in training too, are declared by its spec and never found by looking for an attribute.

Guards against an optional member that is found by `getattr` in one place and forgotten by the wrapper around it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "foredraft"
LOOKUPS = ("getattr", "hasattr", "isinstance", "vars")
# A value is a drafter, or one in training, if its name or the last part of it says so, or if its annotation names such
# a class.
NAME = re.compile(r"(^|_)(drafters?|trainees?|sandboxed|primary|fallback)$|^(drafting|members?)$")
TYPE = re.compile(r"\b\w*(Drafter|Trainee)\b|\bEnsembleMember\b")


def list_annotated(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield name and annotation of every argument and every annotated assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg, ast.unparse(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target).rsplit(".", 1)[-1], ast.unparse(node.annotation)


def find_lookups(text: str) -> list[str]:
    """Return every call of LOOKUPS whose first argument is a drafter, or the class of one."""
    tree = ast.parse(text)
    typed = {name for name, annotation in list_annotated(tree) if TYPE.search(annotation)} - {"self"}
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in LOOKUPS):
            continue
        subject = node.args[0]
        if isinstance(subject, ast.Call) and ast.unparse(subject.func) == "type":
            subject = subject.args[0]
        if isinstance(subject, ast.Subscript):
            subject = subject.value
        name = ast.unparse(subject).rsplit(".", 1)[-1]
        if NAME.search(name) or name in typed:
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: path.relative_to(SOURCES).as_posix())
def test_no_ability_of_a_drafter_is_looked_up(path: Path) -> None:
    assert not find_lookups(path.read_text(encoding="utf-8")), "declare it in DrafterSpec or TraineeSpec"


@pytest.mark.parametrize(
    "seeded",
    [
        "def f(self):\n    return getattr(self.drafter, 'attach', None)",
        "hasattr(llm.drafter, 'spec')",
        "getattr(drafting, 'draft_kv', None)",
        "def f(x: Drafter):\n    return getattr(x, 'title', '')",
        "def f(x: 'DraftModel | EarlyExitDrafter | None'):\n    return isinstance(x, EarlyExit)",
        "class A:\n    part: SandboxedDrafter\n    def f(self):\n        return hasattr(self.part, 'backoffs')",
        "def f(self):\n    return getattr(self.trainee, 'finish', None)",
        "hasattr(trainee, 'prepare')",
        "def f(x: Trainee):\n    return getattr(x, 'on_policy', 0.0)",
        "def f(main_drafter):\n    return isinstance(main_drafter, TokenDraftSource)",
        "getattr(type(self.drafter), 'observe', None)",
        "any(getattr(self.drafters[i], 'needs_target_argmax', False) for i in range(2))",
        "[getattr(member.sandboxed, 'draft_kv', None) for member in members]",
        "'spec' in vars(self.fallback)",
    ],
)
def test_a_seeded_lookup_is_found(seeded: str) -> None:
    assert len(find_lookups(seeded)) == 1


@pytest.mark.parametrize(
    "harmless",
    [
        "getattr(config, 'num_layers', 2)",
        "isinstance(spec, (str, dict))",
        "def f(spec: UserDrafterSpec):\n    return isinstance(spec, str)",
        "isinstance(drafter_name, str)",
    ],
)
def test_other_lookups_are_allowed(harmless: str) -> None:
    assert not find_lookups(harmless)
