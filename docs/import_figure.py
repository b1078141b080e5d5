"""Draw docs/imports.svg and docs/imports-drafters.svg, two import graphs: `python docs/import_figure.py`.

A box is a file or a subfolder. An arrow points from the box that imports to the box that is imported. An arrow is left
out if a longer chain of arrows joins the same two boxes. The program prints the number of boxes and of all arrows.
"""

import ast
import html
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "src" / "foredraft"
WIDTH, MARGIN, BOX_HEIGHT, ROW_HEIGHT, GAP, CHAR_WIDTH = 1000, 10, 26, 64, 12, 7.4  # pixels
FIGURES = {"imports.svg": PACKAGE, "imports-drafters.svg": PACKAGE / "drafters"}  # drawn folder by file
Graph = dict[str, set[str]]


def read_imports(folder: Path) -> Graph:
    """Return the entries of a folder, each with the entries of the same folder that it imports."""
    entries = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    names = {path.stem for path in entries if path.stem not in ("__init__", "__main__")}
    prefix = ("foredraft", *folder.relative_to(PACKAGE).parts)
    graph: Graph = {name: set() for name in names}
    for entry in entries:
        for file in entry.rglob("*.py") if entry.is_dir() else [entry]:
            for module in list_imported_modules(file):
                if entry.stem in names and module[: len(prefix)] == prefix and len(module) > len(prefix):
                    graph[entry.stem] |= {module[len(prefix)]} & (names - {entry.stem})
    return graph


def list_imported_modules(file: Path) -> list[tuple[str, ...]]:
    modules: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules += [(*node.module.split("."), alias.name) for alias in node.names]
    return modules


def find_reachable(graph: Graph, start: str) -> set[str]:
    """Return the boxes that a chain of at least one arrow reaches."""
    found: set[str] = set()
    pending = list(graph[start])
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += graph[name]
    return found


def remove_implied(graph: Graph) -> Graph:
    """Remove the arrows that a longer chain of arrows implies. The graph has no circle."""
    reachable = {name: find_reachable(graph, name) for name in graph}
    return {
        name: {to for to in below if not any(to in reachable[other] for other in below)}
        for name, below in graph.items()
    }


def assign_rows(graph: Graph) -> list[list[str]]:
    """Return the boxes by row, the lowest first: a box stands one row above the highest box that it imports.

    Raises:
        ValueError: if the imports form a circle.
    """
    rows: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(graph):
        row = sorted(name for name in graph if name not in placed and graph[name] <= placed)
        if not row:
            raise ValueError(f"the imports of {sorted(set(graph) - placed)} form a circle")
        rows.append(row)
        placed |= set(row)
    return rows


def place_boxes(rows: list[list[str]]) -> tuple[dict[str, tuple[float, float, float]], int]:
    """Return x, y and width of every box in pixels, and the height of the picture. A long row is broken."""
    lines: list[list[str]] = []
    for row in rows:
        line: list[str] = []
        for name in row:
            if line and sum(measure(n) + GAP for n in [*line, name]) > WIDTH - 2 * MARGIN:
                lines.append(line)
                line = []
            line.append(name)
        lines.append(line)
    boxes = {}
    for index, line in enumerate(reversed(lines)):
        x = (WIDTH - sum(map(measure, line)) - GAP * (len(line) - 1)) / 2
        for name in line:
            boxes[name] = (x, MARGIN + index * ROW_HEIGHT, measure(name))
            x += measure(name) + GAP
    return boxes, 2 * MARGIN + len(lines) * ROW_HEIGHT - (ROW_HEIGHT - BOX_HEIGHT)


def measure(name: str) -> float:
    """Return the width of a box in pixels."""
    return len(name) * CHAR_WIDTH + 16


def draw(graph: Graph) -> str:
    boxes, height = place_boxes(assign_rows(graph))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="5" refY="3" orient="auto">'
        '<path d="M0 0 L6 3 L0 6 z" fill="#888"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for name, below in sorted(remove_implied(graph).items()):
        for other in sorted(below):
            (x, y, width), (to_x, to_y, to_width) = boxes[name], boxes[other]
            start, end = x + width / 2, to_x + to_width / 2
            top, bottom = y + BOX_HEIGHT, to_y - 2
            parts.append(
                f'<path d="M{start:.0f} {top} C{start:.0f} {top + 24} {end:.0f} {bottom - 24} {end:.0f} {bottom}" '
                'fill="none" stroke="#aaa" marker-end="url(#tip)"/>'
            )
    for name, (x, y, width) in sorted(boxes.items()):
        parts += [
            f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="4" '
            'fill="#dae8fc" stroke="#6c8ebf"/>',
            f'<text x="{x + width / 2:.0f}" y="{y + 18}" text-anchor="middle">{html.escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    for file, folder in FIGURES.items():
        graph = read_imports(folder)
        (DOCS / file).write_text(draw(graph))
        print(f"{file}: {len(graph)} boxes, {sum(map(len, graph.values()))} arrows")  # noqa: T201


if __name__ == "__main__":
    main()
