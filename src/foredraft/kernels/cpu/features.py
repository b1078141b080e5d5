"""CPU features of this machine; importing this file imports no torch."""

from pathlib import Path

# CPU features that decide the speed of a forward pass, as /proc/cpuinfo names them.
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "i8mm", "sve")


def read_cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the `CPU_FEATURES` of this machine; without the file, torch's name for its best code path."""
    import torch

    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return [torch.backends.cpu.get_cpu_capability()]
    lines = [line for line in text.splitlines() if line.lower().startswith(("flags", "features"))]
    flags = set(lines[0].split(":", 1)[1].split()) if lines else set()
    return [name for name in CPU_FEATURES if name in flags]
