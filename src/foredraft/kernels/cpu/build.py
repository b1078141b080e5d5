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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "_foredraft.so"
COMMON = "-O3 -std=c11 -fPIC -ffp-contract=fast -fno-math-errno -Wno-psabi -pthread".split()
AVX2 = "-mavx2 -mfma".split()
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq".split()
X86 = {
    "avx512bf16": [*AVX2, *AVX512, "-mavx512bf16", "-mavx512vnni"],
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


def build(out: Path = LIBRARY) -> None:
    """Compile every instruction set into one library. Raises RuntimeError with the compiler's words."""
    command = compiler()
    if command is None:
        raise RuntimeError("no C compiler was found; install gcc or clang, or set CC")
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    sets = {**(X86 if is_x86 else {}), "portable": []}
    defines = ["-DFD_X86"] if is_x86 else []
    with tempfile.TemporaryDirectory() as work:
        jobs = [("team.c", "team", ["-O2", f'-DFD_SOURCE="{fingerprint()}"', *defines])]
        jobs += [("isa.c", name, [*flags, f"-DFD_ISA={name}", *defines]) for name, flags in sets.items()]

        def compile_one(job: tuple[str, str, list[str]]) -> str:
            source, name, flags = job
            target = str(Path(work) / f"{name}.o")
            _run([*command, *COMMON, *flags, "-c", str(HERE / source), "-o", target])
            return target

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, jobs))
        fresh = Path(work) / "library.so"
        _run([*command, "-shared", "-pthread", *objects, "-lm", "-o", str(fresh)])
        out.unlink(missing_ok=True)  # a library in use keeps its own copy
        shutil.copy(fresh, out)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(f"{' '.join(command)}\n" + "\n".join(lines[:20]))


def main() -> int:
    try:
        build()
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"built {LIBRARY.name} for {platform.machine()}")  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
