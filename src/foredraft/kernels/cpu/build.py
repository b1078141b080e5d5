"""Compiles the native library with the system's C compiler: `python -m foredraft.kernels.cpu.build`.

The package's own build runs this file by path, before anything of the package can be imported.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "_foredraft.so"
COMMON = "-O3 -std=c11 -fPIC -ffp-contract=fast -fno-math-errno -Wno-psabi -pthread".split()
AVX2 = "-mavx2 -mfma".split()
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq".split()
AVX512BF16 = [*AVX2, *AVX512, "-mavx512bf16", "-mavx512vnni"]
X86 = {
    "amx": [*AVX512BF16, "-mamx-tile", "-mamx-bf16"],
    "avx512bf16": AVX512BF16,
    "avx512": [*AVX2, *AVX512],
    "avx2": AVX2,
}


def fingerprint(folder: Path = HERE) -> str:
    """Of the sources, so that a library left over from others is noticed."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.c"), *folder.glob("*.h"), Path(__file__)]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> list[str] | None:
    """The command of a C compiler, $CC first."""
    named = os.environ.get("CC", "").split()
    if named and shutil.which(named[0]):
        return named
    found = next((name for name in ("gcc", "clang", "cc") if shutil.which(name)), None)
    return [found] if found else None


def machine_sets() -> dict[str, list[str]]:
    """The instruction sets beyond the portable one that processors of this kind may have, the best first."""
    return X86 if platform.machine().lower() in ("x86_64", "amd64") else {}


def build(
    out: Path = LIBRARY, sets: Mapping[str, Sequence[str]] | None = None, defines: Sequence[str] = ()
) -> tuple[str, ...]:
    """Compile every instruction set into one library, and say which those are: a compiler may not know the latest.

    Raises RuntimeError with the compiler's words.
    """
    command = compiler()
    if command is None:
        raise RuntimeError("no C compiler was found; install gcc or clang, or set CC")
    wanted = {**(machine_sets() if sets is None else sets), "portable": []}
    with tempfile.TemporaryDirectory() as work:

        def compiled(source: str, name: str, *flags: str) -> str:
            target = str(Path(work) / f"{name}.o")
            _run([*command, *COMMON, *flags, "-c", str(HERE / source), "-o", target])
            return target

        def compiled_set(name: str) -> str | None:
            try:
                return compiled("isa.c", name, *wanted[name], f"-DFD_ISA={name}")
            except RuntimeError:
                if name == "portable":
                    raise
                return None  # the library does without it

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = dict(zip(wanted, pool.map(compiled_set, wanted), strict=True))
        made = tuple(name for name, target in objects.items() if target)
        listed = " ".join(f"SET({name})" for name in made)
        team = compiled("team.c", "team", "-O2", f'-DFD_SOURCE="{fingerprint()}"', f"-DFD_SETS={listed}", *defines)
        suffix = compiled("suffix.c", "suffix", "-O2", "-ffp-contract=off")  # its sums are compared bit for bit
        fresh = Path(work) / "library.so"
        parts = [target for target in objects.values() if target]
        _run([*command, "-shared", "-pthread", team, suffix, *parts, "-lm", "-o", str(fresh)])
        out.unlink(missing_ok=True)  # a library in use keeps its own copy
        shutil.copy(fresh, out)
    return made


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(f"{' '.join(command)}\n" + "\n".join(lines[:20]))


def main() -> int:
    try:
        made = build()
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    left_out = [name for name in machine_sets() if name not in made]
    note = f"; this compiler cannot do {', '.join(left_out)}" if left_out else ""
    print(f"built {LIBRARY.name} for {platform.machine()}: {', '.join(made)}{note}")  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
