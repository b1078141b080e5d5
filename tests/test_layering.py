"""The shape of the source tree: imports point down, files and functions stay small, nothing executes data."""

import ast
import importlib
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import foredraft

ROOT = Path(foredraft.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 400, 60

# From the bottom up; a module may import from its own layer and from those below it, and packages form no circle.
# docs/design.md has the reasons.
LAYERS = (
    ("errors",),
    ("kernels",),
    (
        "files",
        "tokenization",
        "zoo",
        "chat",
        "image_files",
        "image_prompt",
        "loaded_adapter",
        "outputs",
        "placed_images",
        "sampling",
        "source",
        "path_features",
        "tree",
    ),
    ("verification",),
    ("draft_length",),
    ("request", "request_options", "request_spec"),
    ("kv",),
    ("models",),
    ("checkpoints", "tensor_parallel"),
    ("drafters",),
    ("engine", "simulation"),
    ("drafter_factory", "request_factory", "target_loading"),
    ("engine_setup", "completion_generator", "image_chat", "target_holder"),
    ("llm",),
    ("bench", "certify", "hf_generate", "server", "train", "vllm"),
    ("batch", "doctor", "handover", "replicas"),
    ("ray_serve", "reproduce", "zoo_training"),
    ("cli",),
    ("__main__", "ray"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
TOP = RANK["llm"]  # modules from this layer on are programs, which may show the version


def module_of(path: Path) -> tuple[str, ...]:
    parts = ("foredraft", *path.relative_to(ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


MODULES = {module_of(path): path for path in FILES}


def rank(module: tuple[str, ...]) -> int:
    return RANK[module[1]]


def find_imports(path: Path, modules: Container[tuple[str, ...]] = MODULES) -> Iterator[tuple[str, ...]]:
    """Yield every module of the package that a file imports, inside functions and for type checks too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: write imports in full"
            base = tuple((node.module or "").split("."))
            if base == ("foredraft",) and [alias.name for alias in node.names] == ["__version__"]:
                names = [base]
            else:
                names = [(*base, alias.name) for alias in node.names]
                names = [name if name in modules else base for name in names]
                assert ("foredraft",) not in names, f"{path.name}: import from the module that defines a name"
        else:
            continue
        yield from (name for name in names if name in modules)


Graph = dict[Any, set[Any]]  # what a module or package imports


def make_graph(modules: Mapping[tuple[str, ...], Path]) -> Graph:
    """Return the imports between modules. The public surface, which imports names late, is left out."""
    return {
        module: {other for other in find_imports(path, modules) if len(other) > 1 and other != module}
        for module, path in modules.items()
        if len(module) > 1
    }


def join_packages(graph: Graph) -> Graph:
    """Return the imports between top-level packages and modules."""
    packages: Graph = {module[1]: set() for module in graph}
    for module, others in graph.items():
        packages[module[1]] |= {other[1] for other in others} - {module[1]}
    return packages


def find_circle(graph: Graph) -> list[Any]:
    """Return the nodes of a circle in order, with the first repeated at the end; empty if there is none."""
    done: set[Any] = set()

    def visit(node: Any, above: list[Any]) -> list[Any]:
        if node in above:
            return [*above[above.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph[node]):
            if circle := visit(other, [*above, node]):
                return circle
        done.add(node)
        return []

    return next((circle for node in sorted(graph) if (circle := visit(node, []))), [])


@pytest.mark.parametrize("module", [m for m in MODULES if len(m) > 1], ids=".".join)
def test_imports_point_down(module):
    assert module[1] in RANK, f"{module[1]} has no layer yet: give it one in LAYERS"
    for other in find_imports(MODULES[module]):
        if other == ("foredraft",):
            assert rank(module) >= TOP, "only programs show the version"
            continue
        assert rank(other) <= rank(module), f"{'.'.join(module)} imports {'.'.join(other)}, which is above it"


def test_every_layer_lists_what_exists():
    assert RANK.keys() == {module[1] for module in MODULES if len(module) > 1}


def test_the_rule_sees_an_import_that_points_up(tmp_path):
    bad = tmp_path / "tree.py"
    bad.write_text("from foredraft.engine.engine import Engine\n")
    [other] = find_imports(bad)
    assert rank(other) > rank(("foredraft", "tree"))


def test_files_and_packages_import_in_no_circle():
    graph = make_graph(MODULES)
    assert not [".".join(module) for module in find_circle(graph)]
    assert not find_circle(join_packages(graph))


@pytest.mark.parametrize(
    ("kv", "models", "circle_of_files", "circle_of_packages"),
    [
        ("from foredraft.models import b", "from foredraft.kv.a import x", True, True),
        ("def f():\n    import foredraft.models.b", "if TYPE_CHECKING:\n    from foredraft.kv import a", True, True),
        ("from foredraft.models import c", "from foredraft.kv import a", False, True),
        ("from foredraft.models import c", "", False, False),
    ],
)
def test_a_seeded_circle_is_found(tmp_path, kv, models, circle_of_files, circle_of_packages):
    texts = {("foredraft", "kv", "a"): kv, ("foredraft", "models", "b"): models, ("foredraft", "models", "c"): ""}
    modules = {module: tmp_path / f"{module[-1]}.py" for module in texts}
    for module, text in texts.items():
        modules[module].write_text(text + "\n")
    graph = make_graph(modules)
    assert bool(find_circle(graph)) is circle_of_files
    assert bool(find_circle(join_packages(graph))) is circle_of_packages


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_and_functions_stay_small(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{node.name} has {length} lines"


MAX_CLASS, MAX_ATTRIBUTES = 200, 12


def measure_classes(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, number of lines and number of attributes of every class.

    Attributes are the names that methods assign on `self`, and the fields of a dataclass that is not frozen. The fields
    of a frozen dataclass are options or a record, and have no limit.
    """
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        names: set[str] = set()
        if "dataclass" in decorators and "frozen=True" not in decorators:
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            names |= {ast.unparse(field.target) for field in fields if "ClassVar" not in ast.unparse(field.annotation)}
        for part in (part for method in node.body for part in ast.walk(method)):
            if (
                isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and ast.unparse(part.value) == "self"
            ):
                names.add(part.attr)
        yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1, len(names)


def test_classes_stay_small():
    large = [
        size
        for path in FILES
        for size in measure_classes(path.read_text(encoding="utf-8"))
        if size[1] > MAX_CLASS or size[2] > MAX_ATTRIBUTES
    ]
    assert not large, f"split these classes, now (lines, attributes); at most {MAX_CLASS} and {MAX_ATTRIBUTES}"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("class A:\n    def f(self):\n        self.a = self.b.c = 1\n        self.d, other.e = 2, 3", (4, 2)),
        ("class A:\n    x: int\n    def f(self):\n        self.a += self.b", (4, 1)),
        ("@dataclass\nclass A:\n    x: int\n    y: ClassVar[int] = 1\n    z: int = field(init=False)", (4, 2)),
        ("@dataclass(frozen=True)\nclass A:\n    x: int\n    y: int", (3, 0)),
    ],
)
def test_the_measure_counts_lines_and_state(text, size):
    assert [tuple(found[1:]) for found in measure_classes(text)] == [size]


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


def find_method_folders() -> dict[str, str]:
    """Return the name of every method of the package by its folder."""
    from foredraft.drafters.registry import load_methods

    makers = {name: method.create or method.from_checkpoint for name, method in load_methods().items()}
    inside = {name: maker.__module__.split(".") for name, maker in makers.items()}
    return {parts[2]: name for name, parts in inside.items() if parts[:2] == ["foredraft", "drafters"]}


METHOD_FOLDERS = find_method_folders()
# Who imports a method's folder without the registry, and why. All other files ask `Method`.
DIRECT_IMPORTS = {
    ("drafter_factory.py", "aggressive"): "predictions are an option of requests, beside every method",
    ("drafter_factory.py", "ensemble"): "so is the drafter that tries the prediction first",
    ("zoo_training/ngram.py", "ngram_lm"): "builds and measures the built-in table",
}


def list_method_imports(path: Path) -> set[str]:
    """List the method folders that a file imports from; its own does not count."""
    parts = path.relative_to(ROOT).parts
    own = parts[1] if parts[0] == "drafters" and len(parts) > 2 else None
    found = {name[2] for name in find_imports(path) if len(name) > 2 and name[1] == "drafters"}
    return (found & set(METHOD_FOLDERS)) - {own}


def test_a_method_is_imported_by_the_registry_alone():
    found = {(path.relative_to(ROOT).as_posix(), name) for path in FILES for name in list_method_imports(path)}
    assert found == set(DIRECT_IMPORTS), "get what you need from a `Method` of drafters/registry.py"


def test_checkpoints_import_no_drafter():
    for module, path in MODULES.items():
        if module[1:2] == ("checkpoints",):
            assert not [name for name in find_imports(path) if name[1:2] == ("drafters",)], path.name


def test_every_method_folder_declares_one_method():
    from foredraft.drafters.method import Method

    for folder in METHOD_FOLDERS:
        module = importlib.import_module(f"foredraft.drafters.{folder}.method")
        found = [name for name, value in vars(module).items() if isinstance(value, Method)]
        assert found == ["METHOD"], folder
    others = {"common"}
    folders = {path.parent.name for path in (ROOT / "drafters").glob("*/__init__.py")}
    assert folders == set(METHOD_FOLDERS) | others


# Words that are names of methods too, and mean something else where they stand.
OTHER_MEANINGS = {
    ("server/schemas.py", "suffix"): "a field of the completion request of OpenAI",
    ("bench/peers/peer_vllm.py", "ngram"): "a mode of the other engine, which runs without this package",
}
METHOD_CONSTANTS = {"METHOD", "NAME"}


def find_method_branches(text: str, names: set[str]) -> Iterator[str]:
    """Find what can branch on a drafting method: its name, or a METHOD constant, compared or as a key.

    Yields the name, or the source of the constant.
    """
    for node in ast.walk(ast.parse(text)):
        for part in (part for key in [*list_compared(node), *list_looked_up(node)] for part in ast.walk(key)):
            if isinstance(part, ast.Constant) and part.value in names:
                yield str(part.value)
            if isinstance(part, ast.Name | ast.Attribute):
                last = part.id if isinstance(part, ast.Name) else part.attr
                if last in METHOD_CONSTANTS:
                    yield ast.unparse(part)


def list_looked_up(node: ast.AST) -> list[ast.expr]:
    """Return the first argument of `get`, `pop` and `setdefault`, and the keys of a `dict` call."""
    if not isinstance(node, ast.Call):
        return []
    if isinstance(node.func, ast.Attribute) and node.func.attr in {"get", "pop", "setdefault"}:
        return node.args[:1]
    is_dict = isinstance(node.func, ast.Name) and node.func.id == "dict"
    return [ast.Constant(word.arg) for word in node.keywords if word.arg is not None] if is_dict else []


def test_nothing_outside_a_method_branches_on_its_name():
    for path in FILES:
        parts = path.relative_to(ROOT).parts
        own = METHOD_FOLDERS.get(parts[1]) if parts[0] == "drafters" else None
        allowed = {word for file, word in OTHER_MEANINGS if file == path.relative_to(ROOT).as_posix()}
        found = set(find_method_branches(path.read_text(encoding="utf-8"), set(METHOD_FOLDERS.values()) - {own}))
        if own is not None:
            found -= METHOD_CONSTANTS
        assert found == allowed, f"{path.name} asks for {found - allowed}"


@pytest.mark.parametrize(
    "line",
    [
        'x = method == "medusa"',
        'x = name in ("eagle", "eagle3")',
        'READERS = {"medusa": read}',
        "READERS = {medusa.METHOD: read}",
        "READERS = {checkpoint.NAME: read}",
        "READERS = dict(medusa=read)",
        'x = READERS["hydra"]',
        'x = READERS.get("hydra")',
        "x = READERS[METHOD]",
        "x = method is METHOD",
        'match method:\n    case "ngram" | "suffix": x = 1',
    ],
)
def test_the_scan_sees_a_branch_on_a_method(line):
    assert list(find_method_branches(line, set(METHOD_FOLDERS.values())))


@pytest.mark.parametrize(
    "line",
    ['DEFAULT = "ngram"', "x = method.uses_model", 'x = {"medusa_num_heads": 1}', "f(METHOD)", 'FOLDERS = ("ngram",)'],
)
def test_the_scan_allows_values_and_declared_facts(line):
    assert list(find_method_branches(line, set(METHOD_FOLDERS.values()))) == []


RULES_FILES = (ROOT / "verification" / "rules.py", ROOT / "verification" / "spectr.py")


def find_rule_branches(text: str) -> Iterator[str]:
    """Find what can branch on a verification rule and not on its properties.

    That is: the name of a rule as text, except as the default of a field; and a rule of one of `RULES_FILES`, or the
    attribute `name` of a rule, in a comparison, in a match statement or as a key.
    """
    from foredraft.verification import rules, spectr
    from foredraft.verification.registry import RULES

    objects = {name for file in (rules, spectr) for name, value in vars(file).items() if isinstance(value, rules.Rule)}
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
        if path not in RULES_FILES and (branches := list(find_rule_branches(path.read_text(encoding="utf-8"))))
    }
    assert not found, "ask the properties of `Rule`"
    for path in RULES_FILES:
        assert list(find_rule_branches(path.read_text(encoding="utf-8"))), "the scan finds no rule where they are"


@pytest.mark.parametrize(
    "line",
    [
        'is_chain = request.spec.rule.name == "block"',
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
        "x = request.spec.rule in (rules.REJECT, rules.BLOCK)",
        "WIDTHS = {BLOCK: 1}",
        "x = rule is SPECTR",
        "x = WIDTHS[request.spec.rule.name]",
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


SCHEDULER_FILE = ROOT / "engine" / "scheduler.py"
# The sandbox restores what the scheduler wrote, after a drafter has changed it.
RESTORER_FILE = ROOT / "drafters" / "request_snapshot.py"
# Inside another engine there is no scheduler: its requests are those that the tracker makes of the engine's rows.
TRACKER_FILE = ROOT / "vllm" / "row_tracker.py"
WRITERS = (SCHEDULER_FILE, RESTORER_FILE, TRACKER_FILE)
MUTATORS = {"append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"}


def find_request_writes(text: str) -> Iterator[str]:
    """Find writes to a field of a request: assignments, deletions, and calls that change a list of it.

    A field counts by its name, if its owner is called `request`, `r`, `writer`, `first` or `victim`, or ends in
    `.request` or `.requests[...]`; `self` is never a request outside `request.py`. Below `spec` everything is frozen.
    """
    from dataclasses import fields

    from foredraft.request import Request

    names = {field.name for field in fields(Request)}

    def is_field(node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript | ast.Starred):  # an entry of a list of it
            return is_field(node.value)
        if not isinstance(node, ast.Attribute) or node.attr not in names:
            return False
        owner = ast.unparse(node.value).split("[")[0].split(".")[-1]
        return owner in {"request", "requests", "r", "writer", "first", "victim"}

    for node in ast.walk(ast.parse(text)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            targets = [node.func.value]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "object.__setattr__"):
            is_request = not {"request", "r"}.isdisjoint(ast.unparse(node.args[0]).split("."))  # or an object below it
            yield from [f"line {node.lineno}: {ast.unparse(node)}"] if is_request else []
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if is_field(part):
                    yield f"line {part.lineno}: {ast.unparse(part)}"


def test_only_the_scheduler_writes_a_request():
    found = {
        path.relative_to(ROOT).as_posix(): writes
        for path in FILES
        if path not in WRITERS and (writes := list(find_request_writes(path.read_text(encoding="utf-8"))))
    }
    assert not found, "return a value, and let the scheduler write it"
    for path in WRITERS:
        assert list(find_request_writes(path.read_text(encoding="utf-8"))), (
            f"{path.name} writes none: the scan is blind"
        )


@pytest.mark.parametrize(
    "line",
    [
        "request.num_computed = 3",
        "request.num_computed += 1",
        "a, request.slot = 1, 2",
        "del request.output[3:]",
        "request.output[-1] = 5",
        "request.pages.append(4)",
        "transcript.request.pages.clear()",
        "batch.requests[b].status = 1",
        "first.output += [1]",
        "setattr(request, name, 3)",
        "request.spec = other",
        "request.spec, x = other, 1",
        "object.__setattr__(batch.request.spec, 'seed', 3)",
        "setattr(r.spec.options, name, 3)",
    ],
)
def test_the_scan_sees_a_write_to_a_request(line):
    assert len(list(find_request_writes(line))) == 1


@pytest.mark.parametrize(
    "line", ["x = request.slot", "self.slot = 3", "tokens = request.output + [1]", "f(request.pages)", "x.slot = 2"]
)
def test_the_scan_allows_reads_and_other_objects(line):
    assert list(find_request_writes(line)) == []
