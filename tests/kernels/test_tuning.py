"""Tuning of products: no bit changes, a slower choice is never taken, and a damaged file is tried again.

Guards against a choice that changes the order of a sum, or that noise selects.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, product
from pathlib import Path

import pytest
import torch

from foredraft.kernels import tuning as module
from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import TILE_SET, NativeLibrary
from foredraft.kernels.linear import PackedWeight, linear
from foredraft.kernels.tuning import (
    CHOICES,
    DEFAULTS,
    MIN_MODEL_BYTES,
    TUNE_VARIABLE,
    Tuning,
    apply_tunings,
    find_best,
    is_faster,
    read_tunings,
    tune_products,
    write_tunings,
)
from tests.support.library_setups import EACH_SET, EMULATED, NATIVE, THREAD_SETUPS, make_normal, use_library

OTHER = Tuning(prefetch=2048, vectors=4, chunk_bytes=1 << 20)


@pytest.fixture
def library() -> Iterator[NativeLibrary]:
    with use_library() as library:
        yield library
        apply_tunings(library, DEFAULTS)


@NATIVE
@pytest.mark.parametrize("instruction_set", [TILE_SET, EMULATED])
@pytest.mark.parametrize("scale", [1.0, 1e-19, 1e19])
def test_few_rows_by_vectors_have_the_bits_of_tiles(instruction_set: str, scale: float) -> None:
    """Vectors take the place of tiles where weights are prefetched. Tiles count subnormal numbers as zero."""
    values = make_normal(1000, 2102, seed=0) * scale
    values[:, ::19] = 1e-39
    weight = PackedWeight.pack(values.bfloat16(), None, Arena())  # too large for prefetching to be left out
    x = make_normal(3, 2102, seed=1) * min(1.0, scale)
    x[:, ::17] = 5e-40
    with use_library(instruction_set, THREAD_SETUPS[1]) as native:
        expected = linear(x, weight)
        assert expected.isfinite().all()
        apply_tunings(native, tuple(Tuning(prefetch=2048, vectors=vectors) for vectors in (8, 4, 2)))
        try:
            for rows in (x[:1], x[1:2], x[:2], x[1:]):
                first = int((x == rows[0]).all(1).nonzero())
                ours = linear(rows, weight)
                assert torch.equal(ours.view(torch.int32), expected[first : first + len(rows)].view(torch.int32))
        finally:
            apply_tunings(native, DEFAULTS)


@NATIVE
@EACH_SET
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_tuning_changes_a_bit(instruction_set: str, dtype: torch.dtype) -> None:
    weight = PackedWeight.pack(make_normal(300, 70, seed=0, dtype=dtype), make_normal(300, seed=1), Arena())
    x = make_normal(33, 70, seed=2)
    with use_library(instruction_set, THREAD_SETUPS[1]) as native:
        row_counts = (1, 2, 3, 4, 5, 8, 17, 33)
        expected = [linear(x[:rows], weight) for rows in row_counts]
        for values in product(*CHOICES.values()):
            tuning = Tuning(**dict(zip(CHOICES, values, strict=True)))
            apply_tunings(native, (tuning, replace(tuning, vectors=2), tuning))
            try:
                for rows, reference in zip(row_counts, expected, strict=True):
                    assert torch.equal(linear(x[:rows], weight), reference), (rows, tuning)
            finally:
                apply_tunings(native, DEFAULTS)


def test_the_fastest_choices_are_found() -> None:
    def measure(row_class: int, tuning: Tuning) -> float:
        return 1.0 + abs(tuning.prefetch - 2048) / 1e4 + (tuning.vectors != 4) + tuning.chunk_bytes / (1 << 28)

    for row_class in range(3):
        assert find_best(row_class, measure, float("inf")) == Tuning(2048, 4, 256 << 10)
        assert find_best(row_class, measure, 0.0) == DEFAULTS[row_class]


@pytest.mark.parametrize("period", [2, 3, 4, 5])
def test_weights_that_take_turns_do_not_decide(period: int) -> None:
    """Fault that it guards: each choice was tried on a weight of its own, which lay in faster memory or not."""
    turns = count()

    def measure(row_class: int, tuning: Tuning) -> float:
        return 1.0 + next(turns) % period

    assert find_best(0, measure, float("inf")) == DEFAULTS[0]


@pytest.mark.parametrize(
    ("times", "is_taken"),
    [
        ([0.9, 0.9, 0.9, 0.9, 1.1], True),
        ([0.9, 0.9, 0.9, 1.1, 1.1], False),  # noise
        ([0.99, 0.99, 0.99, 0.99, 0.99], False),  # too little
    ],
)
def test_a_choice_must_be_clearly_faster(times: list[float], is_taken: bool) -> None:
    assert is_faster(times, [1.0] * 5) == is_taken


def test_tunings_are_kept_by_processor(tmp_path: Path) -> None:
    file = tmp_path / "new" / "tuning.json"
    assert read_tunings(file, "one") is None
    write_tunings(file, "one", (OTHER, *DEFAULTS[1:]))
    write_tunings(file, "two", DEFAULTS)
    assert read_tunings(file, "one") == (OTHER, *DEFAULTS[1:])
    assert read_tunings(file, "two") == DEFAULTS
    assert read_tunings(file, "three") is None
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"one": [{}]}', '{"one": [{"prefetch": 7}, {}, {}]}', '{"one": [{"speed": 1}, {}, {}]}', '{"one": 3}'],
)
def test_a_damaged_file_is_as_none(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(content)
    assert read_tunings(file, "one") is None
    write_tunings(file, "one", DEFAULTS)
    assert read_tunings(file, "one") == DEFAULTS


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_tunings(tmp_path / "file" / "tuning.json", "one", DEFAULTS)


@NATIVE
def test_a_large_model_is_tuned_once(library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(TUNE_VARIABLE, "1")
    monkeypatch.setattr(module, "search", lambda native: calls.append(native) or (OTHER,) * 3)
    module._tune_once.cache_clear()
    assert tune_products(library, MIN_MODEL_BYTES - 1) == DEFAULTS
    assert not calls
    assert tune_products(library, MIN_MODEL_BYTES) == (OTHER,) * 3
    module._tune_once.cache_clear()  # as a new process, which reads the file
    assert tune_products(library, MIN_MODEL_BYTES) == (OTHER,) * 3
    assert len(calls) == 1
    [stored] = json.loads((tmp_path / "foredraft" / "tuning.json").read_text()).values()
    assert stored[0]["vectors"] == OTHER.vectors
    monkeypatch.setenv(TUNE_VARIABLE, "0")
    assert tune_products(library, MIN_MODEL_BYTES) == DEFAULTS
    module._tune_once.cache_clear()


@NATIVE
def test_the_search_measures_the_library_and_restores_the_defaults(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WEIGHT_SHAPE", (64, 32))
    assert len(module.search(library)) == 3
