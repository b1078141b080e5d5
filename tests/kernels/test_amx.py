"""The set "amx" beyond its products: refusals of the emulation, handling of a wrong one, compilers without it.

Its products are tested with those of the other sets, emulated. Guards against a configuration or a shape that the
processor would answer with a fault, tiles that compute wrongly and are used all the same, and a build that fails
because the set is missing.
"""

import ctypes
import re
import signal
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.errors import ForedraftError
from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu import build
from foredraft.kernels.cpu.library import TILE_SET, NativeLibrary, load_library
from foredraft.kernels.cpu.records import LinearRecord
from foredraft.kernels.linear import PackedWeight, linear
from tests.support.library_setups import EMULATED, NATIVE, build_emulated, make_normal, use_library

pytestmark = NATIVE

FACTORS = "tile_configure(&s); tile_load(4, x, 64); tile_load(6, x, 64);"
SOUND = FACTORS + "tile_zero(0); tile_dot(0, 4, 6); tile_store(0, x, 64); tile_release(); tile_configure(&s);"
FAULTS = {
    "a tile before it is configured": "tile_zero(0);",
    "a tile after its release": "tile_configure(&s); tile_release(); tile_zero(0);",
    "a product that did not release": "tile_configure(&s); tile_configure(&s);",
    "another palette": "s.palette = 2; tile_configure(&s);",
    "17 rows": "s.rows[3] = 17; tile_configure(&s);",
    "rows of 65 bytes": "s.row_bytes[3] = 65; tile_configure(&s);",
    "rows of nothing": "s.row_bytes[3] = 0; tile_configure(&s);",
    "a ninth tile configured": "s.rows[8] = s.row_bytes[8] = 1; tile_configure(&s);",
    "a ninth tile": "tile_configure(&s); tile_zero(8);",
    "a tile of no size": "s.rows[3] = s.row_bytes[3] = 0; tile_configure(&s); tile_load(3, x, 64);",
    "a tile times itself": "tile_configure(&s); tile_dot(0, 4, 4);",
    "a sum of another height": "s.rows[0] = 5; tile_configure(&s); tile_dot(0, 4, 6);",
    "a sum of another width": "s.row_bytes[0] = 32; tile_configure(&s); tile_dot(0, 4, 6);",
    "factors that do not meet": "s.rows[6] = 15; tile_configure(&s); tile_dot(0, 4, 6);",
}


def test_the_emulation_refuses_what_the_processor_does(tmp_path: Path) -> None:
    """Otherwise its tests would prove nothing about the processor."""
    cases = "".join(f"case {i}: {body} break;" for i, body in enumerate([SOUND, *FAULTS.values()]))
    source = tmp_path / "faults.c"
    source.write_text(
        f"""#include "amx.h"
        static char x[1024];
        int main(int count, char **words) {{
            tile_shapes s = {{.palette = 1}};
            for (int i = 0; i < 8; i++) s.rows[i] = 16, s.row_bytes[i] = 64;
            switch (atoi(words[count - 1])) {{ {cases} }}
        }}"""
    )
    program = tmp_path / "faults"
    command = [*(build.find_compiler() or []), "-std=c11", "-Wno-psabi", "-DFD_AMX_EMULATED", f"-I{build.HERE}"]
    subprocess.run([*command, str(source), "-lm", "-o", str(program)], check=True)
    ends = [subprocess.run([str(program), str(i)], check=False).returncode for i in range(len(FAULTS) + 1)]
    assert dict(zip(["sound", *FAULTS], ends, strict=True)) == {"sound": 0, **dict.fromkeys(FAULTS, -signal.SIGABRT)}


@pytest.mark.parametrize("rows", [16, 17, 31, 32, 33, 63, 64, 65, 321, 545])
def test_heights_around_those_of_tiles(rows: int) -> None:
    """The last tiles reach back over rows that are done, which must be neither lost nor written twice."""
    weight = PackedWeight.pack(make_normal(70, 66, seed=0, dtype=torch.bfloat16), make_normal(70, seed=1), Arena())
    x = make_normal(rows, 66, seed=2)
    with use_library(EMULATED):
        ours = linear(x, weight)
        assert torch.equal(ours[::7], torch.cat([linear(row[None], weight) for row in x[::7]]))
    with use_library("portable"):
        torch.testing.assert_close(ours, linear(x, weight), rtol=1e-4, atol=1e-4)


class Crooked:
    """The emulated library, but for a fault of its tiles: `spoil(number of rows, results)`."""

    def __init__(self, spoil: Any) -> None:
        self.spoil, self.own = spoil, build_emulated().handle
        self.allowed = {b"", b"amx"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def fd_disable(self, name: bytes) -> None:
        self.allowed -= {b"", name}

    def fd_select(self, name: bytes) -> int:
        if name in self.allowed:
            return int(self.own.fd_select(name))
        return -1 if name == b"amx" else int(self.own.fd_select(b"portable"))

    def fd_linear_with(self, name: bytes, product: LinearRecord) -> int:
        failed = int(self.own.fd_linear_with(name, product))
        if name == b"amx":
            count = product.rows * product.weight.contents.n
            self.spoil(product.rows, (ctypes.c_float * count).from_address(product.out))
        return failed


def off_by_little(rows: int, results: Any) -> None:
    results[len(results) - 1] += 0.01


def other_bits_in_company(rows: int, results: Any) -> None:
    if rows > 16:
        results[len(results) - 1] *= 1 + 2.0**-22


def not_a_number(rows: int, results: Any) -> None:
    results[0] = float("nan")


@pytest.mark.parametrize("spoil", [off_by_little, other_bits_in_company, not_a_number])
def test_tiles_that_compute_wrongly_are_said_once_and_not_used(spoil: Any) -> None:
    native = NativeLibrary(Crooked(spoil))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="'amx' kernels compute wrongly on this processor"):
        native.select()
    assert native.instruction_set == "portable"
    assert not native.is_supported("amx")  # a second warning would be an error
    with pytest.raises(ForedraftError, match="no 'amx' kernels"):
        native.select("amx")
    assert native.instruction_set == "portable"


def test_right_tiles_are_the_first_choice_and_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        native = NativeLibrary(build_emulated().handle)
        native.select()
        assert native.instruction_set == "amx"
        assert native.has_correct_tiles


def test_a_set_that_was_named_is_not_tried_against_another() -> None:
    """A caller that names avx2 must not cause a request for tiles from the system."""
    native = NativeLibrary(Crooked(not_a_number))  # type: ignore[arg-type]
    native.select("portable")
    assert native.instruction_set == "portable"


def test_a_compiler_that_knows_no_tiles_builds_the_other_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "cc"
    found = " ".join(build.find_compiler() or [])
    old.write_text(f'#!/bin/sh\ncase "$*" in *-mamx*) echo unknown option >&2; exit 1;; esac\nexec {found} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CC", str(old))
    out = tmp_path / "library.so"
    assert build.build(out, {TILE_SET: ["-mamx-tile", "-mamx-bf16"]}) == ("portable",)
    handle = ctypes.CDLL(str(out))
    assert handle.fd_select(b"amx") == -1
    assert handle.fd_select(b"") == 0


def test_the_library_here_has_every_set_that_its_compiler_knows() -> None:
    """A mistake in one set's code would otherwise go unnoticed: the library does without it."""
    native = load_library()
    assert native is not None
    source = build.HERE / "dispatch.c"
    for name, flags in build.list_machine_sets().items():
        command = [*(build.find_compiler() or []), *flags, "-E", "-o", "/dev/null", str(source), "-DFD_SETS="]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            assert hasattr(native.handle, f"fd_{name}"), name


def test_nothing_but_the_wrapper_names_a_tile_instruction() -> None:
    """The emulation replaces the wrapper, so what goes past it would be run for the first time by a user."""
    named = {file.name for file in build.HERE.glob("*.h") if re.search(r"\b_tile_\w+", file.read_text())}
    assert named == {"amx.h"}
