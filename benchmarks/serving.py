"""Load figures of docs/performance.md, on the built-in pair and on a memory-bound model.

    python benchmarks/serving.py --grown FOLDER [--parts builtin,grown] [--json PREFIX] [--plot FILE] [--quick]
    python benchmarks/serving.py --draw PREFIX-builtin.json,PREFIX-grown.json --plot docs/serving.png

Every part is one run of `foredraft bench load` with the options in PARTS; foredraft/bench/load.py describes the method.
Create FOLDER with `foredraft bench grow --params 430M --out FOLDER`. A part takes about the time of its --minutes. No
other program should run on the machine.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from foredraft.bench import load_plot
from foredraft.bench.load import LoadCell, LoadPoint

# Part -> options of `foredraft bench load`.
PARTS = {
    "builtin": "--minutes 6 --prompts 96 --prompt-tokens 64 --max-tokens 96 --least 8 --waves 3 --rounds 7",
    # Passes over 16 or more tokens are compute-bound; short prompts keep most of the time for decoding.
    "grown": "--minutes 7 --prompts 96 --prompt-tokens 32 --max-tokens 40 --least 4 --waves 3 --rounds 5",
}
QUICK = "--minutes 0.5 --prompts 8 --prompt-tokens 16 --max-tokens 8 --least 2 --waves 1 --rounds 1 --more 2"
QUICK_STREAMS = "1,4"
MIN_OVER_OFF = 0.97  # goal: throughput of auto over off
MIN_OVER_BEST = 0.95  # goal at few streams: throughput of auto over the best fixed length


def run_part(part: str, options: argparse.Namespace) -> Path:
    """Run one part and return the path of its JSON file."""
    json_file = Path(f"{options.json}-{part}.json")
    arguments = [*(QUICK if options.quick else PARTS[part]).split(), "--json", str(json_file)]
    arguments += ["--markdown", f"{options.json}-{part}.md", "--concurrency", options.concurrency]
    arguments += ["--method", options.method, "--temperature", str(options.temperature)]
    for name in ("threads", "url"):
        if getattr(options, name) is not None:
            arguments += [f"--{name}", str(getattr(options, name))]
    if part == "grown":
        arguments += ["--model", options.grown]
    print(f"foredraft bench load {' '.join(arguments)}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "foredraft", "bench", "load", *arguments], check=True)
    return json_file


def load_panel(json_file: Path) -> tuple[str, list[LoadPoint]]:
    """Load the points of one panel of the plot."""
    data = json.loads(json_file.read_text())
    points = []
    for entry in data["points"]:
        cells = tuple(LoadCell(**cell) for cell in entry["cells"])
        points.append(LoadPoint(entry["concurrency"], cells, entry["best_fixed"], entry["auto_over_best"]))
    return data["title"] + (", a grown model" if data["model"]["grown_from"] else ""), points


def format_verdict(points: list[LoadPoint], max_streams: int = 4) -> str:
    """Compare auto with off at every point, and with the best fixed length up to `max_streams` streams."""
    lines = []
    for point in points:
        auto = point.find_cell("auto")
        if auto is not None:
            line = f"{point.concurrency:3} streams: auto {auto.over_off:.2f}x of off"
            line += "" if auto.over_off >= MIN_OVER_OFF else f" (below {MIN_OVER_OFF})"
            if point.concurrency <= max_streams and point.auto_over_best is not None:
                line += f", {point.auto_over_best:.2f}x of K = {point.best_fixed}"
                line += "" if point.auto_over_best >= MIN_OVER_BEST else f" (below {MIN_OVER_BEST})"
            lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="builtin,grown", help="parts, separated by commas")
    parser.add_argument("--grown", help="folder of the memory-bound model")
    parser.add_argument("--concurrency", default=None)
    parser.add_argument("--method", default="draft_model")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--url", help="running server to measure, with one part only")
    parser.add_argument("--json", default="serving", help="prefix of the JSON and Markdown files")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--draw", help="only plot these JSON files, separated by commas")
    parser.add_argument("--quick", action="store_true", help="smoke test; its figures have no meaning")
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
        load_plot.save_load_plot(panels, "band: lowest to highest round; speculation pays above 1", options.plot)


if __name__ == "__main__":
    main()
