"""Settings of a training run, and the part of them that determines the resulting weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.files.disk import convert_write_errors, replace_text
from foredraft.train.optimizer import DECAYS, OPTIMIZERS
from foredraft.train.remote.client import check_url

PLAN_FILE = "training.json"


@dataclass(frozen=True)
class DataConfig:
    """Training documents, and how they become rows."""

    files: tuple[str, ...]
    held_out: tuple[str, ...] = ()  # files; () = a share of the data
    held_out_share: float = 0.02  # share of the documents, if there are no held-out files
    context: int = 256  # tokens per row
    generate: bool | None = None  # whether the target writes the documents; None = if it has a chat template
    temperatures: tuple[float, ...] = (0.0, 1.0)  # temperatures of successive answers, in turn
    written: int = 192  # tokens; maximum length of an answer
    opening: int = 64  # tokens of a plain text that become a prompt
    cache: str | None = None  # folder for traces
    top: int | None = None  # tokens of the target's distribution to store; None = chosen by the vocabulary size


@dataclass(frozen=True)
class OptimizationConfig:
    """Steps, batches and optimizer."""

    steps: int | None = None  # None = one pass over the data, at most DEFAULT_STEPS
    batch_tokens: int = 2048  # tokens per step, over all processes
    parts: int = 1  # forward and backward passes per step
    learning_rate: float = 1e-3
    warmup: float = 0.04  # share of the steps
    decay: str = "cosine"
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    clip: float = 1.0  # maximum norm of the gradient
    seed: int = 0


@dataclass(frozen=True)
class EvaluationConfig:
    """Prompts and lengths of the replay that measures the drafter."""

    every: int = 0  # steps between evaluations; 0 = at the end only
    prompts: int = 16  # held-out prompts
    tokens: int = 64  # tokens after each prompt
    num_tokens: int = 5  # draft length


@dataclass(frozen=True)
class TrainPlan:
    """Settings of a training run."""

    method: str
    model: str
    out: Path
    data: DataConfig
    steps: OptimizationConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    settings: Mapping[str, str] | None = None  # options of the method's TrainConfig
    start: str | None = None  # folder of a drafter to start from
    device: str = "auto"
    dtype: str = "auto"
    precision: str = "auto"
    save_every: int = 200  # steps between checkpoints
    max_steps: int | None = None  # steps before this run stops as if interrupted
    max_minutes: float | None = None
    target_url: str | None = None  # server that runs the target; None = it runs here
    target_key: str | None = None  # API key of that server
    tensorboard: bool = False

    def check(self) -> None:
        """Check the settings before a model is loaded.

        Raises:
            ForedraftError: if the run cannot work.
        """
        data, steps = self.data, self.steps
        if not data.files:
            raise ForedraftError("no data; give files with --data, or --data builtin")
        if self.out.exists() and not self.out.is_dir():
            raise ForedraftError(f"{self.out} is a file; give a folder to write to")
        if self.out.is_dir() and not (self.out / PLAN_FILE).exists():
            others = sorted(file.name for file in self.out.iterdir() if not file.name.startswith("generated."))
            if others:  # it may be a model's folder, whose config.json must not be overwritten
                raise ForedraftError(
                    f"{self.out} holds {others[0]} and no training run; give an empty folder to write to"
                )
        if self.target_url is not None:
            check_url(self.target_url)
        for name, value in (
            ("context", data.context - 1),
            ("batch-tokens", steps.batch_tokens),
            ("parts", steps.parts),
        ):
            if value < 1:
                raise ForedraftError(f"--{name} is too small")
        if steps.steps is not None and steps.steps < 1:
            raise ForedraftError(f"--steps must be at least 1, got {steps.steps}")
        if steps.batch_tokens < data.context:
            raise ForedraftError(
                f"a step of {steps.batch_tokens} tokens holds no row of {data.context}; raise --batch-tokens or lower "
                "--context"
            )
        if not steps.learning_rate > 0:
            raise ForedraftError(f"--learning-rate must be positive, got {steps.learning_rate}")
        if not steps.clip > 0:
            raise ForedraftError(f"--clip must be positive, got {steps.clip}")
        if not 0 <= data.held_out_share < 1:
            raise ForedraftError(f"--held-out-share must lie in 0..1, got {data.held_out_share}")
        for choice, choices in ((steps.decay, DECAYS), (steps.optimizer, OPTIMIZERS)):
            if choice not in choices:
                raise ForedraftError(f"unknown value {choice!r}; use one of {', '.join(choices)}")

    def make_identity(self, **more: Any) -> dict[str, Any]:
        """Return the settings that a resumed run must share with the run that stopped."""
        data = {key: value for key, value in asdict(self.data).items() if key not in ("files", "held_out", "cache")}
        identity = {
            "method": self.method,
            "settings": dict(self.settings or {}),
            "start": self.start,
            "precision": self.precision,
            "data": data,
            "steps": asdict(self.steps),
            **more,
        }
        return json.loads(json.dumps(identity))  # type: ignore[no-any-return]  # tuples become lists


def find_difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> str | None:
    """Describe the first difference between two identities, None if they are equal.

    Args:
        old: Identity of the earlier run.
        new: Identity of this run.
        prefix: Prepended to the key in the description.
    """
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            difference = find_difference(a, b, f"{prefix}{key}.")
            if difference is not None:
                return difference
        elif a != b:
            return f"{prefix}{key} was {a!r} and is {b!r}"
    return None


def record_identity(out: Path, identity: dict[str, Any], has_checkpoint: bool) -> None:
    """Write the identity of a run into its folder.

    Args:
        out: Output folder of the run.
        identity: Settings that a resumed run must share.
        has_checkpoint: Whether the folder holds a checkpoint, which must be of a run with the same identity.

    Raises:
        ForedraftError: if the checkpoint is of another run, or the folder cannot be written.
    """
    file = out / PLAN_FILE
    if has_checkpoint and file.exists():
        try:
            old = json.loads(file.read_text())
        except ValueError:
            raise ForedraftError(f"{file} is damaged; give another --out, or delete {out} to begin again") from None
        difference = find_difference(old, identity)
        if difference is not None:
            raise ForedraftError(
                f"{out} holds the checkpoint of another run: {difference}; "
                "give another --out, or delete it to begin again"
            )
    with convert_write_errors(out, "make room, or give another --out"):
        out.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(identity, indent=1) + "\n")
