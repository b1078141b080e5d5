"""Tuning of products for the processor at hand. It changes their time and no bit.

The choices are tried once per processor, on weights that no cache holds, and kept in a file in the user's cache folder.
A choice takes the place of the default only if it is clearly faster, so a busy machine keeps the defaults.
"""

import json
import logging
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from itertools import count as count_up
from pathlib import Path

import torch

from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import ROW_CLASSES, NativeLibrary, TuningRecord
from foredraft.kernels.linear import PackedWeight, linear

log = logging.getLogger(__name__)

TUNE_VARIABLE = "FOREDRAFT_TUNE"  # "0" = no tuning
MIN_MODEL_BYTES = 100 << 20  # smaller models stay in caches, and need no tuning
WEIGHT_SHAPE = (16384, 2048)  # of the trial product, 64 MiB in bfloat16
COLD_WEIGHTS = 3  # that are multiplied in turn
CLASS_ROWS = (1, 4, 8)  # rows of the trial product by class
ROUNDS = 9
MIN_GAIN = 0.02  # share of the time that a choice must save
MAX_SECONDS = 2.0  # after which no further choice is tried


@dataclass(frozen=True)
class Tuning:
    """Choices for products of one class of rows, as `fd_tuning` has them."""

    prefetch: int = 0  # bytes
    vectors: int = 8
    chunk_bytes: int = 256 << 10


DEFAULTS = (Tuning(), Tuning(), Tuning(prefetch=6144))  # by class of rows
CHOICES: dict[str, tuple[int, ...]] = {
    "prefetch": (0, 2048, 6144, 16384),
    "vectors": (8, 4, 2),
    "chunk_bytes": (256 << 10, 1 << 20, 4 << 20),
}
Measure = Callable[[int, Tuning], float]  # class of rows, tuning -> seconds


def find_best(row_class: int, measure: Measure, deadline: float) -> Tuning:
    """Find the tuning of a class of rows, one choice after the other.

    Args:
        row_class: 0 to ROW_CLASSES - 1.
        measure: measures a product.
        deadline: `time.perf_counter()` after which no further choice is tried.
    """
    best = DEFAULTS[row_class]
    for name, values in CHOICES.items():
        if time.perf_counter() >= deadline:
            break
        variants = [replace(best, **{name: value}) for value in values if value != getattr(best, name)]
        times: dict[Tuning, list[float]] = {variant: [] for variant in (best, *variants)}
        for turn in range(ROUNDS):
            order = [best, *variants]
            shift = turn % len(order)  # so that no variant always has the same weight, or the same predecessor
            for variant in order[shift:] + order[:shift]:
                times[variant].append(measure(row_class, variant))
        fastest = min(variants, key=lambda variant: statistics.median(times[variant]))
        if is_faster(times[fastest], times[best]):
            best = fastest
    return best


def is_faster(times: list[float], reference: list[float]) -> bool:
    """Return whether a choice saves `MIN_GAIN` in the median, and time in four of five rounds."""
    wins = sum(ours < theirs for ours, theirs in zip(times, reference, strict=True))
    return 5 * wins >= 4 * len(times) and statistics.median(times) <= (1 - MIN_GAIN) * statistics.median(reference)


def apply_tunings(library: NativeLibrary, tunings: tuple[Tuning, ...]) -> None:
    """Set the tunings of all classes of rows in this process. No product may run meanwhile."""
    library.handle.fd_tune((TuningRecord * ROW_CLASSES)(*(TuningRecord(*astuple(tuning)) for tuning in tunings)))


def search(library: NativeLibrary, seconds: float = MAX_SECONDS) -> tuple[Tuning, ...]:
    """Try the choices with bfloat16 weights and return the best tunings; the defaults are set afterwards."""
    began = time.perf_counter()
    arena = Arena()  # all weights in one kind of memory
    first = PackedWeight.pack(torch.ones(*WEIGHT_SHAPE, dtype=torch.bfloat16), None, arena)
    weights = [first, *(replace(first, data=arena.copy(first.data)) for _ in range(COLD_WEIGHTS - 1))]
    rows = [torch.ones(count, first.k) for count in CLASS_ROWS]
    turns = count_up()

    def measure(row_class: int, tuning: Tuning) -> float:
        apply_tunings(library, tuple(tuning for _ in DEFAULTS))
        weight = weights[next(turns) % COLD_WEIGHTS]
        start = time.perf_counter()
        linear(rows[row_class], weight)
        return time.perf_counter() - start

    try:
        return tuple(
            find_best(row_class, measure, began + seconds * (row_class + 1) / ROW_CLASSES)
            for row_class in range(ROW_CLASSES)
        )
    finally:
        apply_tunings(library, DEFAULTS)


def find_cache_file() -> Path:
    """Return the file of the tunings that were found."""
    folder = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(folder) / "foredraft" / "tuning.json"


def name_processor(library: NativeLibrary, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name under which the tunings of this machine are kept: processor, instruction set and threads."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{model}, {library.instruction_set}, {torch.get_num_threads()} threads"


def read_tunings(file: Path, name: str) -> tuple[Tuning, ...] | None:
    """Read the tunings of a processor; None if the file has none, or others than `CHOICES`."""
    try:
        stored = json.loads(file.read_text())[name]
        tunings = tuple(Tuning(**entry) for entry in stored)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_known = all(getattr(tuning, field) in values for tuning in tunings for field, values in CHOICES.items())
    return tunings if is_known and len(tunings) == ROW_CLASSES else None


def write_tunings(file: Path, name: str, tunings: tuple[Tuning, ...]) -> None:
    """Add the tunings of a processor to the file. A folder that cannot be written is no error."""
    try:
        known = json.loads(file.read_text())
        known = known if isinstance(known, dict) else {}
    except (OSError, ValueError):
        known = {}
    known[name] = [{field.name: getattr(tuning, field.name) for field in fields(Tuning)} for tuning in tunings]
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(file)
    except OSError as error:
        log.info("the tuning of the kernels is not kept (%s)", error)


@cache
def _tune_once(library: NativeLibrary) -> tuple[Tuning, ...]:
    name, file = name_processor(library), find_cache_file()
    tunings = read_tunings(file, name)
    if tunings is None:
        began = time.perf_counter()
        tunings = search(library)
        log.info("tuned the kernels for %s in %.1f s", name, time.perf_counter() - began)
        write_tunings(file, name, tunings)
    apply_tunings(library, tunings)
    return tunings


def tune_products(library: NativeLibrary, num_bytes: int = MIN_MODEL_BYTES) -> tuple[Tuning, ...]:
    """Tune the products of this process before a model runs, unless FOREDRAFT_TUNE=0, and return the tunings in use.

    Args:
        library: native library.
        num_bytes: weights of the model. Nothing is tried for a small one.
    """
    is_wanted = num_bytes >= MIN_MODEL_BYTES and os.environ.get(TUNE_VARIABLE) != "0"
    return _tune_once(library) if is_wanted else DEFAULTS
