"""The load figures of docs/performance.md: many requests at once on the built-in pair and on a memory-bound model.

    python benchmarks/serving.py --grown FOLDER [--parts builtin,grown] [--json PREFIX] [--plot FILE] [--quick]
    python benchmarks/serving.py --draw PREFIX-builtin.json,PREFIX-grown.json --plot docs/serving.png

Every part is one run of `foredraft bench load`, whose options stand in PARTS; what is measured and how stands there and
in foredraft/bench/load.py. FOLDER is made by `foredraft bench grow --params 430M --out FOLDER`. Nothing else should run
on the machine meanwhile: a part takes about as long as its --minutes say.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from foredraft.bench import load_plot
from foredraft.bench.load import LoadCell, LoadPoint

PARTS = {
    "builtin": "--minutes 8 --prompts 96 --prompt-tokens 64 --max-tokens 96 --least 8 --waves 3 --rounds 7",
    # a pass over 16 tokens takes as long as its arithmetic: short prompts leave the time to what is compared
    "grown": "--minutes 12 --prompts 96 --prompt-tokens 32 --max-tokens 40 --least 4 --waves 3 --rounds 5",
}
QUICK = "--minutes 0.5 --prompts 8 --prompt-tokens 16 --max-tokens 8 --least 2 --waves 1 --rounds 1 --more 2"
QUICK_STREAMS = "1,4"


def run_part(part: str, options: argparse.Namespace) -> Path:
    """One part; where its figures are."""
    figures = Path(f"{options.json}-{part}.json")
    words = [*(QUICK if options.quick else PARTS[part]).split(), "--json", str(figures)]
    words += ["--markdown", f"{options.json}-{part}.md", "--concurrency", options.concurrency]
    words += ["--method", options.method, "--temperature", str(options.temperature)]
    for name in ("threads", "url"):
        if getattr(options, name) is not None:
            words += [f"--{name}", str(getattr(options, name))]
    if part == "grown":
        words += ["--model", options.grown]
    print(f"foredraft bench load {' '.join(words)}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "foredraft", "bench", "load", *words], check=True)
    return figures


def load_panel(figures: Path) -> tuple[str, list[LoadPoint]]:
    """Load the points of one panel of the plot."""
    data = json.loads(figures.read_text())
    points = []
    for entry in data["points"]:
        cells = tuple(LoadCell(**cell) for cell in entry["cells"])
        points.append(LoadPoint(entry["concurrency"], cells, entry["best_fixed"], entry["auto_over_best"]))
    return data["title"] + (", a grown model" if data["model"]["grown_from"] else ""), points


def format_verdict(points: list[LoadPoint], until: int = 4) -> str:
    """Compare with the goals: auto against off at every point, and against the best fixed length at few streams."""
    lines = []
    for point in points:
        auto = point.find_cell("auto")
        if auto is not None:
            words = f"{point.concurrency:3} streams: auto {auto.over_off:.2f}x of off"
            words += "" if auto.over_off >= 0.97 else " (below 0.97)"
            if point.concurrency <= until and point.auto_over_best is not None:
                words += f", {point.auto_over_best:.2f}x of K = {point.best_fixed}"
                words += "" if point.auto_over_best >= 0.95 else " (below 0.95)"
            lines.append(words)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="builtin,grown", help="by commas")
    parser.add_argument("--grown", help="folder of the memory-bound model")
    parser.add_argument("--concurrency", default=None)
    parser.add_argument("--method", default="draft_model")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--url", help="of a running server, instead of an engine here; give one part")
    parser.add_argument("--json", default="serving", help="prefix of the files of figures and tables")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--draw", help="only plot these files of figures, by commas")
    parser.add_argument("--quick", action="store_true", help="a smoke test; its figures mean nothing")
    options = parser.parse_args()
    options.concurrency = options.concurrency or (QUICK_STREAMS if options.quick else "1,2,4,8,16,32,64")
    parts = [part for part in options.parts.split(",") if part]
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts are {', '.join(PARTS)}")
    if "grown" in parts and not options.grown and not options.draw:
        parser.error("the part grown needs --grown FOLDER: foredraft bench grow --params 430M --out FOLDER")
    files = [Path(name) for name in options.draw.split(",")] if options.draw else [run_part(p, options) for p in parts]
    panels = [load_panel(file) for file in files]
    for title, points in panels:
        print(f"{title}\n{format_verdict(points)}", file=sys.stderr)
    if options.plot:
        load_plot.save_load_plot(
            panels, "a band from the lowest to the highest round; what is above 1 pays", options.plot
        )


if __name__ == "__main__":
    main()
