"""Acceptance of Medusa heads trained alone and together with the built-in target, after the same number of steps.

    python benchmarks/medusa2.py [--steps 80] [--rows 4] [--settings "" backbone=2,lora_rank=64] [--new] [--out FOLDER]

Each of --settings is one run, with commas between its settings; "" is the frozen target, and "start" the heads before
training. All runs have the same texts, order and seed, and start from the built-in heads, or with --new from new ones
(then without "start"). The columns: acceptance length with a chain of 4 tokens on held-out prompts, greedy and at
temperature 1, each with the run's own target; the divergence of that target from the original one and its loss on
held-out text, in nats per token; time of the steps and the measurement. A row that is in --out is not repeated.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from foredraft import LLM, zoo
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.train.config import DataConfig, EvaluationConfig, OptimizationConfig, TrainPlan
from foredraft.train.documents import Document
from foredraft.train.evaluate import Evaluator
from foredraft.train.run import train
from foredraft.train.settings import parse_pairs
from foredraft.train.trace import Tracer
from foredraft.train.trainable_target import TrainableTarget
from foredraft.zoo import corpus

START = "start"  # row of the heads before training
JOINT = "backbone=2,backbone_warmup=0,heads_weight=4,lora_rank=64"
SETTINGS = (START, "", JOINT, f"{JOINT},backbone_loss=ce")
CONTEXT = 256  # tokens per row
TRAIN_FILES = 300  # files of the corpus that are read
EVALUATION = EvaluationConfig(prompts=96, tokens=64, num_tokens=4)


def write_texts(out: Path) -> tuple[Path, Path]:
    """Write token ids of training and held-out files of the corpus; an existing file is kept."""
    files = out / "train.npy", out / "held.npy"
    if not all(file.exists() for file in files):
        out.mkdir(parents=True, exist_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(zoo.find_folder("target"))
        for file, sources in zip(files, corpus.split(), strict=True):
            step = max(1, len(sources) // TRAIN_FILES)
            texts = [tokenizer(source.text).input_ids for source in sources[::step]]
            np.save(file, np.concatenate([[0, *ids] for ids in texts]).astype(np.uint16))
    return files


def train_heads(out: Path, settings: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train heads with the settings, and return the figures of the run."""
    texts, held_out = write_texts(out)
    plan = TrainPlan(
        method="medusa", model=str(zoo.find_folder("target")), out=out / (settings.replace(",", "-") or "frozen"),
        data=DataConfig((str(texts),), (str(held_out),), context=CONTEXT, generate=False),
        steps=OptimizationConfig(
            options.steps, options.rows * CONTEXT, learning_rate=options.learning_rate, optimizer="muon"
        ),
        evaluation=EVALUATION, settings=parse_pairs([*filter(None, settings.split(","))]), start=options.start,
        device="cpu", precision=options.precision, save_every=1000,
    )  # fmt: skip
    result = train(plan, on_step=lambda status: print(f"\r{status.step}: {status.loss:.4f} ", end=""))
    if not result.is_done:
        raise SystemExit(f"stopped after step {result.step}; the same command resumes the run")
    return result.eval_metrics


def measure(out: Path, settings: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one row of the table; they are kept in a file."""
    file = out / f"{settings or 'frozen'}.json"
    if file.exists():
        return dict(json.loads(file.read_text()))
    began, held_out = time.monotonic(), write_texts(out)[1]
    if settings == START:
        metrics = make_evaluator(held_out).replay(options.start)
    else:
        metrics = train_heads(out, settings, options)
    if "target_kl" not in metrics:
        metrics |= measure_original(held_out)
    row = {name: metrics[name]["length"] for name in ("greedy", "sampled")}
    row |= {name: metrics[name] for name in ("target_kl", "target_ce")} | {"seconds": time.monotonic() - began}
    file.write_text(json.dumps(row))
    return row


def make_evaluator(held_out: Path) -> Evaluator:
    """Make the evaluator that the runs use, with the original target."""
    llm = LLM(str(zoo.find_folder("target")), None)
    ids = np.load(held_out).astype(np.int64)
    documents = [Document(part) for part in np.split(ids, np.flatnonzero(ids == 0)[1:])]
    return Evaluator(llm, "medusa", EVALUATION, documents, CONTEXT, Tracer(llm.target))


def measure_original(held_out: Path) -> dict[str, float]:
    """Measure the original target on the held-out rows of the runs."""
    evaluator = make_evaluator(held_out)
    target = TrainableTarget.from_model(evaluator.llm.target, (AFTER_FINAL_NORM,))
    return target.measure(evaluator.trace_held_out())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS))
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--new", dest="start", action="store_const", const=None, default=str(zoo.find_folder("medusa")))
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("medusa2"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = {settings or "frozen": measure(options.out, settings, options) for settings in options.settings}
    print("\n| target | AL, greedy | AL, T = 1 | KL | loss | seconds |\n|---|---|---|---|---|---|")
    for name, row in rows.items():
        lengths = f"{row['greedy']:.2f} | {row['sampled']:.2f}"
        print(f"| {name} | {lengths} | {row['target_kl']:.4f} | {row['target_ce']:.4f} | {row['seconds']:.0f} |")


if __name__ == "__main__":
    main()
