"""MkDocs hook: two pages of the site are files of the repository's root."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages, with their links written from the folder `docs`."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = text.replace("](docs/", "](").replace("](README.md)", "](index.md)")
        files.append(File.generated(config, page, content=text))
    return files
