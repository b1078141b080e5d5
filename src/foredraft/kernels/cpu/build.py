"""Build of the native library with the system's C compiler: `python -m foredraft.kernels.cpu.build`.

The package's build runs this file by path before the package can be imported, so it imports only the standard library.
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
COMMON_FLAGS = "-O3 -std=c11 -fPIC -ffp-contract=off -fno-math-errno -Wno-psabi -pthread".split()
AVX2 = "-mavx2 -mfma".split()
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq".split()
AVX512VNNI = [*AVX2, *AVX512, "-mavx512vnni"]
AVX512BF16 = [*AVX512VNNI, "-mavx512bf16"]
X86_SETS = {
    "amx": [*AVX512BF16, "-mamx-tile", "-mamx-bf16"],
    "avx512bf16": AVX512BF16,
    "avx512vnni": AVX512VNNI,
    "avx512": [*AVX2, *AVX512],
    "avx2": AVX2,
}
ARM_SETS = {"neonbf16": ["-march=armv8.2-a+bf16+i8mm"]}  # the portable set has NEON

MACHINE_SETS = {"x86_64": X86_SETS, "amd64": X86_SETS, "aarch64": ARM_SETS}


def compute_fingerprint(folder: Path = HERE) -> str:
    """Hash the sources, to detect a library that was built from other sources."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.c"), *folder.glob("*.h"), Path(__file__)]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str] | None:
    """Return the command of a C compiler, $CC first; None without one."""
    from_environment = os.environ.get("CC", "").split()
    if from_environment and shutil.which(from_environment[0]):
        return from_environment
    found = next((name for name in ("gcc", "clang", "cc") if shutil.which(name)), None)
    return [found] if found else None


def list_machine_sets() -> dict[str, list[str]]:
    """Return the compiler flags of the instruction sets of this architecture, the best first, without the portable."""
    return MACHINE_SETS.get(platform.machine().lower(), {})


def build(
    out: Path = LIBRARY, sets: Mapping[str, Sequence[str]] | None = None, defines: Sequence[str] = ()
) -> tuple[str, ...]:
    """Compile every instruction set into one library.

    Args:
        out: path of the library.
        sets: compiler flags by instruction set; None = all of this architecture.
        defines: further flags for dispatch.c.

    Returns:
        Names of the compiled sets; a set that the compiler does not support is omitted.

    Raises:
        RuntimeError: with the compiler's output.
    """
    command = find_compiler()
    if command is None:
        raise RuntimeError("no C compiler was found; install gcc or clang, or set CC")
    wanted = {**(list_machine_sets() if sets is None else sets), "portable": []}
    with tempfile.TemporaryDirectory() as work:

        def compile_source(source: str, name: str, *flags: str) -> str:
            target = str(Path(work) / f"{name}.o")
            _run_command([*command, *COMMON_FLAGS, *flags, "-c", str(HERE / source), "-o", target])
            return target

        def compile_set(name: str) -> str | None:
            try:
                return compile_source("isa.c", name, *wanted[name], f"-DFD_ISA={name}")
            except RuntimeError:
                if name == "portable":
                    raise
                return None  # an unsupported set is omitted

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = dict(zip(wanted, pool.map(compile_set, wanted), strict=True))
        made = tuple(name for name, target in objects.items() if target)
        set_list = " ".join(f"SET({name})" for name in made)
        fingerprint = f'-DFD_FINGERPRINT="{compute_fingerprint()}"'
        dispatch = compile_source("dispatch.c", "dispatch", "-O2", fingerprint, f"-DFD_SETS={set_list}", *defines)
        others = [compile_source(f"{name}.c", name, "-O2") for name in ("team", "suffix")]
        fresh = Path(work) / "library.so"
        parts = [target for target in objects.values() if target]
        _run_command([*command, "-shared", "-pthread", dispatch, *others, *parts, "-lm", "-o", str(fresh)])
        out.unlink(missing_ok=True)  # a process that has the old library open keeps its copy
        shutil.copy(fresh, out)
    return made


def _run_command(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        raise RuntimeError(f"{' '.join(command)}\n" + "\n".join(lines[:20]))


def main() -> int:
    """Build the library, print the result and return the exit code."""
    try:
        built_sets = build()
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    unsupported_sets = [name for name in list_machine_sets() if name not in built_sets]
    note = f"; this compiler does not support {', '.join(unsupported_sets)}" if unsupported_sets else ""
    print(f"built {LIBRARY.name} for {platform.machine()}: {', '.join(built_sets)}{note}")  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
