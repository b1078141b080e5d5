"""The documents: code blocks run, names exist, words follow the glossary."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, Sampling
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.registry import load_methods

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
DRAFTER_PAGE = DOCS / "how-to" / "write-a-drafter.md"
BLOCK = re.compile(r"<!-- (?P<mark>[^>]+) -->\n```python\n(?P<code>.*?)```", re.DOTALL)
PROMPT, GREEDY = "class TestQueue(unittest.TestCase):", Sampling(temperature=0, max_tokens=48)
# words that the glossary replaces: law -> distribution, coin -> uniform, purse -> time credit, guard -> sandbox, ...
BANNED = re.compile(
    r"\b(laws?|coins?|purse|guard(s|ed)?|who|whom|whoever|nobody|everybody|told|probation|overlay)\b", re.IGNORECASE
)
PATHS = re.compile(r"`((?:src|tests|benchmarks|docs|dev|kernels|server|engine|models|zoo|drafters)/[\w./-]+\.\w+)`")
MODULES = re.compile(r"`(foredraft(?:\.\w+)+)`")


def find_marked(page: Path, mark: str) -> list[str]:
    return [found["code"] for found in BLOCK.finditer(page.read_text("utf-8")) if found["mark"] == mark]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def drafter_names() -> dict[str, Any]:
    """The names that the drafter of the page defines, and those of its module form."""
    names: dict[str, Any] = {"__name__": "page"}
    for mark in ("test: drafter", "test: module"):
        [code] = find_marked(DRAFTER_PAGE, mark)
        exec(compile(code, str(DRAFTER_PAGE), "exec"), names)  # noqa: S102 - the page is part of the repository
    return names


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM(drafter=None)


@pytest.mark.parametrize("verify", ["match", "reject", "block"])
def test_the_drafter_of_the_page_drafts_and_leaves_the_output_unchanged(drafter_names, target, verify):
    llm = target.with_drafter(drafter_names["PairDrafter"](num_speculative_tokens=4), verify=verify)
    [completion], [baseline] = llm.generate([PROMPT], GREEDY), target.generate([PROMPT], GREEDY)
    assert completion.token_ids == baseline.token_ids
    assert completion.stats.num_accepted > 0
    assert llm.engine.drafter.num_failures == 0, "the sandbox hid a fault of the drafter"


def test_the_options_of_one_request_run_as_the_page_has_them(capsys):
    names: dict[str, Any] = {}
    [code] = find_marked(DOCS / "how-to" / "request-options.md", "test: request options")
    exec(code, names)  # noqa: S102 - the page is part of the repository
    plain, bounded, predicted, block, typical = names["completions"]
    assert [c.verification for c in names["completions"]] == ["match", "match", "match", "block", "typical"]
    assert plain.stats.num_drafted == 0
    assert predicted.stats.num_predicted > 0
    assert plain.token_ids == bounded.token_ids == predicted.token_ids == block.token_ids
    assert typical.stats.num_tokens == 48
    assert capsys.readouterr().out.startswith("[('match', 1.0)")


def test_the_module_form_of_the_drafter_is_a_method(drafter_names, target):
    method = drafter_names["METHOD"]
    made = method.create(method.config(), DrafterContext(target.target.vocab_size))
    assert isinstance(made, drafter_names["PairDrafter"])
    assert method.name not in load_methods(), "the page's example has the name of a real method"


def test_the_example_of_use_runs(drafter_names):
    [code] = find_marked(DRAFTER_PAGE, "test: use")
    exec(compile(code, str(DRAFTER_PAGE), "exec"), dict(drafter_names))  # noqa: S102


@pytest.mark.parametrize(
    "code",
    [code for page in PAGES[1:] for code in find_marked(page, "run")],
    ids=lambda code: code.split("\n")[-2][:40],
)
def test_a_marked_snippet_runs(code):
    exec(compile(code, "page", "exec"), {"__name__": "page"})  # noqa: S102


def test_every_method_has_a_page_with_a_figure():
    for name in load_methods():
        page = DOCS / "methods" / f"{name}.md"
        assert page.exists(), f"docs/methods/{name}.md is missing"
        [figure] = re.findall(r"!\[[^\]]+\]\((\w+\.svg)\)", page.read_text("utf-8"))
        assert (page.parent / figure).exists()
        assert "## Reference" in page.read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_and_modules_that_a_page_names_exist(page):
    """Fault: after a rename the documents named files that no longer existed."""
    text = page.read_text("utf-8")
    package = ROOT / "src" / "foredraft"
    for path in PATHS.findall(text):
        assert any((folder / path).exists() for folder in (ROOT, package)), f"{path} does not exist"
    for name in MODULES.findall(text):
        parts = name.split(".")[1:]
        if parts[0] in {"__all__", "generate", "speculate"}:
            continue
        for count in range(len(parts), 0, -1):
            file = package.joinpath(*parts[:count])
            if file.is_dir() or file.with_suffix(".py").exists():
                break
        else:
            raise AssertionError(f"{name} does not exist")
        if count < len(parts) and not file.is_dir():
            assert re.search(rf"\b(class|def) {parts[count]}\b", file.with_suffix(".py").read_text("utf-8")), name


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_page_uses_the_words_of_the_glossary(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<!-- models: begin -->.*<!-- models: end -->", " ", text, flags=re.DOTALL)
    found = sorted({match[0] for match in BANNED.finditer(text)})
    assert not found, f"{page.name} uses {found}; see docs/glossary.md"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_page_begins_with_what_it_is_and_one_command(page):
    if page.name == "glossary.md":
        return
    title, first, *rest = re.split(r"\n\n+", page.read_text("utf-8").strip())
    assert title.startswith("# ")
    assert not first.startswith(("#", "|", "```")), "the first paragraph is prose"
    assert "```" in "\n\n".join(rest[:6]) or page.name == "README.md", "a command or a snippet stands near the top"


@pytest.mark.parametrize("file", ["imports.svg", "imports-drafters.svg"])
def test_the_import_graphs_are_those_of_the_sources(file):
    figure = runpy.run_path(str(DOCS / "import_figure.py"))
    drawn = figure["draw"](figure["read_imports"](figure["FIGURES"][file]))
    assert (DOCS / file).read_text() == drawn, "run python docs/import_figure.py"


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    missing = {page for page in pages if not page.startswith("figures/") and f" {page}\n" not in config}
    assert not missing, "add these pages to the navigation of mkdocs.yml"
