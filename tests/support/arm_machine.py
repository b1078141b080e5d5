"""An ARM processor in emulation (qemu) that runs functions of the native library.

The library is compiled for ARM by a cross compiler. Records and tensors of a call lie in a file that both processes map
at the same address, so the pointers inside are valid in both.
"""

import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from foredraft.kernels.cpu import build

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
ADDRESS, MEMORY_BYTES, SCRATCH_BYTES = 0x2000_0000_0000, 8 << 20, 1 << 20
MAP_FIXED_NOREPLACE = 0x100000
IS_THERE = shutil.which(COMPILER) is not None and shutil.which(EMULATOR) is not None
ARM = pytest.mark.skipif(
    not IS_THERE, reason=f"no {COMPILER} or no {EMULATOR} (packages gcc-aarch64-linux-gnu, qemu-user)"
)
NEW_PROCESSOR, OLD_PROCESSOR = "max", "cortex-a72"  # the second has neither bfloat16 nor products of bytes
NO_SET = 3  # exit status of the program


def build_program(folder: Path) -> Path:
    """Compile the library and the program that calls it."""
    with mock.patch.dict(os.environ, {"CC": COMPILER}):
        sets = build.build(folder / "lib_foredraft.so", build.ARM_SETS)
    assert sets == (*build.ARM_SETS, "portable")
    program = folder / "program"
    command = [COMPILER, "-std=c11", f"-I{build.HERE}", str(Path(__file__).with_suffix(".c")), "-o", str(program)]
    subprocess.run([*command, f"-L{folder}", "-l_foredraft", f"-Wl,-rpath,{folder}"], check=True)
    return program


@dataclass
class ArmMachine:
    """Memory that is shared with the emulated program.

    Attributes:
        program: compiled by `build_program`.
        path: file of the memory.
        processor: name of qemu's processor.
    """

    program: Path
    path: Path
    processor: str = NEW_PROCESSOR
    used: int = field(default=SCRATCH_BYTES, init=False)  # bytes; the first are scratch

    @contextmanager
    def map_memory(self) -> Iterator["ArmMachine"]:
        """Map the memory for the time of the context. Tensors in it are invalid afterwards."""
        self.path.write_bytes(bytes(MEMORY_BYTES))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        with self.path.open("r+b") as file:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            flags = mmap.MAP_SHARED | MAP_FIXED_NOREPLACE
            found = libc.mmap(ADDRESS, MEMORY_BYTES, protection, flags, file.fileno(), 0)
        assert found == ADDRESS, f"address {ADDRESS:#x} is taken"
        try:
            yield self
        finally:
            libc.munmap(ctypes.c_void_p(ADDRESS), ctypes.c_size_t(MEMORY_BYTES))

    def _reserve(self, size: int) -> int:
        address = ADDRESS + self.used
        self.used += -(-size // 64) * 64
        assert self.used <= MEMORY_BYTES, "the memory is full"
        return address

    def place(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in the memory."""
        source = tensor.contiguous()
        size = source.numel() * source.element_size()
        data = (ctypes.c_char * max(size, 1)).from_address(self._reserve(size))
        placed = torch.frombuffer(data, dtype=source.dtype, count=source.numel()).view(source.shape)
        return placed.copy_(source)

    def place_record(self, record: ctypes.Structure) -> int:
        """Copy a record into the memory and return its address."""
        size = ctypes.sizeof(record)
        address = self._reserve(size)
        ctypes.memmove(address, ctypes.byref(record), size)
        return address

    @property
    def scratch(self) -> int:
        """Address of the scratch memory."""
        return ADDRESS

    def run(self, function: str, *addresses: int, instruction_set: str = "", threads: int = 1) -> int:
        """Run a function on records at these addresses and return the program's exit status."""
        command: list[Any] = [
            EMULATOR, "-L", "/usr/aarch64-linux-gnu", "-cpu", self.processor, self.program, self.path, ADDRESS,
            MEMORY_BYTES, instruction_set, threads, function, *addresses, SCRATCH_BYTES,
        ]  # fmt: skip
        return subprocess.run([str(word) for word in command], check=False).returncode
