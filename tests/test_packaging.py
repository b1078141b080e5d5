"""Metadata that a package index shows and requires."""

import importlib.util
import tomllib
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_WHEEL_BYTES = 85e6
HOME = "https://example.org/foredraft"


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_and_images_become_absolute(hooks):
    """Fault: README's pictures and links were relative and broke on a package index."""
    text = "See [docs](docs/a.md), [web](https://x.org) and ![pic](docs/p.png)."
    assert hooks.make_absolute(text, HOME) == (
        f"See [docs]({HOME}/blob/main/docs/a.md), [web](https://x.org) and ![pic]({HOME}/raw/main/docs/p.png)."
    )
    assert hooks.make_absolute(text, "") == "See docs, [web](https://x.org) and ."


def test_the_readme_has_no_relative_link_left(hooks):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for home in (HOME, ""):
        made = hooks.make_absolute(readme, home)
        assert "](docs/" not in made


def test_the_licences_of_the_training_texts_are_part_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"LICENSE", "NOTICE", "LICENSES/*"} <= set(project["license-files"])
    notice = (ROOT / "NOTICE").read_text()
    for text in sorted((ROOT / "LICENSES").iterdir()):
        assert text.name in notice


def test_every_relative_link_of_the_documents_leads_to_a_file(hooks):
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for _, target in [*hooks.LINK.findall(page.read_text()), *hooks.IMAGE.findall(page.read_text())]:
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name}: {target}"


def test_the_wheel_has_room_for_more_models():
    """An index takes 100 MB per file; 85 MB is the limit here. A wheel is a zip file, so its files are deflated."""
    package = ROOT / "src" / "foredraft"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    size = sum(len(zlib.compress(path.read_bytes(), 6)) for path in files)
    assert 30e6 < size < MAX_WHEEL_BYTES
