"""Certificates of every built-in pair and method: the table in docs/how-to/certify.md.

Run: python benchmarks/certificates.py [--out FOLDER] [--only NAME,...] [-- OPTIONS OF foredraft certify]
Each row is one run of `foredraft certify`. Runs whose JSON file is in the folder are not repeated.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

DECODER_METHODS = (
    "ngram", "suffix", "lookahead", "token_recycling", "ngram_lm", "aggressive", "draft_model", "early_exit", "medusa",
    "hydra", "mlp_speculator", "eagle", "eagle3", "chimera", "blockwise", "dflash", "draft_model+ngram", "auto",
)  # fmt: skip
SEQ2SEQ_METHODS = ("aggressive", "draft_model", "medusa", "eagle", "blockwise", "aggressive+blockwise")
HEADER = "| target | method | passed | largest bias of a step | whole outputs: bias found with 99 % | s |"


def run(model: str, method: str, out: Path, options: list[str]) -> dict[str, object]:
    """Certify one pair in a process of its own, unless its result is there."""
    path = out / f"{model}-{method}.json"
    if not path.exists():
        command = [sys.executable, "-m", "foredraft", "certify", "--model", model, "--spec-method", method]
        done = subprocess.run([*command, "--json", str(path), *options], capture_output=True, text=True, check=False)
        if not path.exists():
            return {"passed": False, "seconds": 0, "checks": [], "verdict": done.stderr.strip().splitlines()[-1:]}
    return dict(json.loads(path.read_text()))


def format_row(model: str, method: str, result: dict[str, object]) -> str:
    """Format one row of the table."""
    checks = [check for check in result["checks"] if isinstance(check, dict)]  # type: ignore[attr-defined]
    biases = [c["figures"]["bias"] for c in checks if "bias" in c["figures"]]
    found = [c["figures"]["detectable_bias"] for c in checks if c["name"].startswith("first") and c["figures"]]
    step = f"{max(biases):.2%}" if biases else "-"
    outputs = f"{max(found):.1%}" if found else "-"
    verdict = "yes" if result["passed"] else f"no: {result['verdict']}"
    return f"| {model} | {method} | {verdict} | {step} | {outputs} | {result['seconds']:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("certificates"))
    parser.add_argument("--only", default="")
    parser.add_argument("options", nargs="*", help="options of foredraft certify, after --")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    print(HEADER + "\n|---|---|---|---:|---:|---:|")
    pairs = [("builtin", m) for m in DECODER_METHODS] + [("builtin-seq2seq", m) for m in SEQ2SEQ_METHODS]
    for model, method in pairs:
        if not given.only or method in given.only.split(","):
            print(format_row(model, method, run(model, method, given.out, given.options)), flush=True)


if __name__ == "__main__":
    main()
