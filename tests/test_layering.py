"""The shape of the source tree: imports point down, files and functions stay small, nothing executes data."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import foredraft

ROOT = Path(foredraft.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 400, 60

# From the bottom up; a module may import from its own layer and from those below it. docs/design.md has the reasons.
LAYERS = (
    (
        "errors",
        "json_depth",
        "tokenization",
        "chat",
        "outputs",
        "sampling",
        "tree",
        "source",
        "verification",
        "request",
    ),
    ("draft_length",),
    ("kv", "models", "kernels", "checkpoints"),
    ("drafters",),
    ("engine",),
    (
        "llm",
        "drafter_factory",
        "hf_generate",
        "request_factory",
        "config",
        "server",
        "train",
        "bench",
        "certify",
        "doctor",
        "deploy",
        "zoo",
        "cli",
        "__main__",
    ),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
TOP = len(LAYERS) - 1
# Every layer may import the paths of the built-in folders; their training belongs to the top layer.
FACTS = {("foredraft", "zoo"): 0}


def module_of(path: Path) -> tuple[str, ...]:
    parts = ("foredraft", *path.relative_to(ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


MODULES = {module_of(path): path for path in FILES}


def rank(module: tuple[str, ...]) -> int:
    return FACTS.get(module, RANK[module[1]] if len(module) > 1 else TOP)


def find_imports(path: Path, at_import_only: bool = False) -> Iterator[tuple[str, ...]]:
    """Yield every module of the package that a file imports; a name of the package itself counts as the top."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_import_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: write imports in full"
            base = tuple((node.module or "").split("."))
            names = [(*base, alias.name) if (*base, alias.name) in MODULES else base for alias in node.names]
        else:
            continue
        yield from (name for name in names if name in MODULES)


@pytest.mark.parametrize("module", [m for m in MODULES if len(m) > 1], ids=".".join)
def test_imports_point_down(module):
    assert module[1] in RANK, f"{module[1]} has no layer yet: give it one in LAYERS"
    for other in find_imports(MODULES[module]):
        is_own_version = other == ("foredraft",) and rank(module) == TOP
        assert is_own_version or rank(other) <= rank(module), (
            f"{'.'.join(module)} imports {'.'.join(other)}, which is above it"
        )


def test_the_rule_sees_an_import_that_points_up(tmp_path):
    bad = tmp_path / "tree.py"
    bad.write_text("from foredraft.engine.engine import Engine\n")
    [other] = find_imports(bad)
    assert rank(other) > rank(("foredraft", "tree"))


def test_no_import_cycle():
    seen: dict[tuple[str, ...], bool] = {}  # False while on the way down

    def visit(module: tuple[str, ...], above: tuple[tuple[str, ...], ...]) -> None:
        assert seen.get(module, True), f"cycle: {' > '.join('.'.join(m) for m in (*above, module))}"
        if module in seen:
            return
        seen[module] = False
        for other in find_imports(MODULES[module], at_import_only=True):
            if len(other) > 1 and other != module:
                visit(other, (*above, module))
        seen[module] = True

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_and_functions_stay_small(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{node.name} has {length} lines"


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def dangers(text: str) -> Iterator[str]:
    """Find calls and imports that could run code from a file: pickles, eval and exec, remote code, unsafe loads."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        if called in ("eval", "exec", "__import__", "os.system"):
            yield f"calls {called}"
        if called == "torch.load" and given.get("weights_only") is not True:
            yield "calls torch.load without weights_only=True"
        yield from (
            f"{name}=True" for name in ("trust_remote_code", "allow_pickle", "shell") if given.get(name) is True
        )


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nothing_executes_data(path):
    assert list(dangers(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from dill import loads",
        "eval('1')",
        "exec(x)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "np.load(f, allow_pickle=True)",
        "run(c, shell=True)",
    ],
)
def test_the_scan_sees_what_it_forbids(line):
    assert len(list(dangers(line))) == 1


def test_the_scan_allows_what_is_safe():
    assert list(dangers("model.eval(); torch.load(f, weights_only=True); re.compile('x')")) == []


def test_nothing_outside_a_method_branches_on_its_name():
    from foredraft.drafters.registry import load_methods

    names = set(load_methods())
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                operands = [node.left, *node.comparators]
                found = {o.value for o in operands if isinstance(o, ast.Constant)} & names
                assert not found or path.parent.name == "drafters", f"{path.name}:{node.lineno} asks for {found}"


RULES_FILE = ROOT / "verification" / "rules.py"


def find_rule_branches(text: str) -> Iterator[str]:
    """Find what can branch on a verification rule and not on its properties.

    That is: the name of a rule as text, except as the default of a field; and a rule of `verification/rules.py`, or
    the attribute `name` of a rule, in a comparison, in a match statement or as a key.
    """
    from foredraft.verification import rules
    from foredraft.verification.registry import RULES

    objects = {name for name, value in vars(rules).items() if isinstance(value, rules.Rule)}
    nodes = list(ast.walk(ast.parse(text)))
    defaults = [node.value for node in nodes if isinstance(node, ast.AnnAssign)]
    for node in nodes:
        if isinstance(node, ast.Constant) and node.value in RULES and not any(node is value for value in defaults):
            yield f"line {node.lineno}: {node.value!r}"
        for part in (part for key in list_compared(node) for part in ast.walk(key)):
            name = part.id if isinstance(part, ast.Name) else part.attr if isinstance(part, ast.Attribute) else ""
            is_rule_name = name == "name" and ast.unparse(part).endswith("rule.name")
            if name in objects or is_rule_name:
                yield f"line {part.lineno}: {ast.unparse(part)}"


def list_compared(node: ast.AST) -> list[ast.expr]:
    """Return the operands of a comparison, the subject or value of a match statement, or the keys of a dict."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key is not None]
    if isinstance(node, ast.Match):
        return [node.subject]
    if isinstance(node, ast.Subscript):
        return [node.slice]
    if isinstance(node, ast.MatchValue):
        return [node.value]
    return []


def test_nothing_outside_its_file_branches_on_a_rule():
    found = {
        path.relative_to(ROOT).as_posix(): branches
        for path in FILES
        if path != RULES_FILE and (branches := list(find_rule_branches(path.read_text(encoding="utf-8"))))
    }
    assert not found, "ask the properties of `Rule`"
    assert list(find_rule_branches(RULES_FILE.read_text(encoding="utf-8"))), "the scan finds no rule where they are"


@pytest.mark.parametrize(
    "line",
    [
        'is_chain = request.rule.name == "block"',
        'x = verify in ("reject", "block")',
        'x = "match" != verify',
        'LOSSY = frozenset({"typical"})',
        'WIDTHS = {"block": 1}',
        'WIDTHS = dict([("block", 1)])',
        'x = WIDTHS["block"]',
        'x = widths.get("block", 2)',
        'match verify:\n    case "match" | "reject": x = 1',
        "match rule.name:\n    case name: x = name",
        "x = rule is MATCH",
        "x = request.rule in (rules.REJECT, rules.BLOCK)",
        "WIDTHS = {BLOCK: 1}",
        "x = WIDTHS[request.rule.name]",
        "x = a.rule.name == b.rule.name",
    ],
)
def test_the_scan_sees_a_branch_on_a_rule(line):
    assert list(find_rule_branches(line))


@pytest.mark.parametrize(
    "line",
    [
        "x = rule.takes_trees",
        'verification: str = "match"',
        "x = RULES[completion.verification]",
        "x = MATCH if is_greedy else REJECT",
        "x = first is other",
        "f(rule.name)",
    ],
)
def test_the_scan_allows_properties_and_borders(line):
    assert list(find_rule_branches(line)) == []
