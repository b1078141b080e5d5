"""Loading of the native library, its entry points and its use of torch's threads.

The library takes addresses, so it links to nothing.
"""

import ctypes
import os
import warnings
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch

from foredraft.errors import ForedraftError
from foredraft.kernels.cpu import build
from foredraft.kernels.cpu.openmp import share_threads
from foredraft.kernels.cpu.records import (
    RECORDS,
    AttentionRecord,
    ChainRecord,
    DraftsRecord,
    LinearRecord,
    MixingRecord,
    ModelRecord,
    PassRecord,
    RowsRecord,
    SamplingRecord,
    Seq2SeqRecord,
    StepNetworkRecord,
    StepPassRecord,
    StepRootsRecord,
    TuningRecord,
    WalksRecord,
    WeightRecord,
)

KERNELS_VARIABLE = "FOREDRAFT_KERNELS"  # name of an instruction set, or "torch" for no native kernels
ROW_CLASSES = 3  # of tunings: products of 1 row, of 2 to 4, of more
INSTRUCTION_SETS = (*build.list_machine_sets(), "portable")  # of this architecture, the best first
TILE_SET = "amx"


@dataclass(frozen=True)
class NativeLibrary:
    """Entry points of the loaded library. Calls release the interpreter's lock."""

    handle: ctypes.CDLL

    @property
    def instruction_set(self) -> str:
        return str(self.handle.fd_selected().decode())

    def select(self, name: str = "") -> None:
        """Select an instruction set; "" = the best available. Raises ForedraftError if it is not available."""
        if name in ("", TILE_SET) and not self.has_correct_tiles:
            self.handle.fd_disable(TILE_SET.encode())
        if self.handle.fd_select(name.encode()):
            known = ", ".join(INSTRUCTION_SETS)
            raise ForedraftError(f"this processor has no {name!r} kernels; use one of {known} that it has, or torch")

    def is_supported(self, name: str) -> bool:
        """Return whether this processor supports an instruction set. Afterwards the best set is selected."""
        self.select()
        found = bool(self.handle.fd_select(name.encode()) == 0)
        self.handle.fd_select(b"")
        return found

    @cached_property
    def has_correct_tiles(self) -> bool:
        """False, with a warning, if the processor's tiles compute wrongly. The code was tested in emulation only."""
        is_right = self._has_correct_products(TILE_SET)
        if not is_right:
            warnings.warn(
                f"the {TILE_SET!r} kernels compute wrongly on this processor, and Foredraft does without them; please "
                "report it, with the processor's name",
                stacklevel=3,
            )
        return is_right

    def _has_correct_products(self, name: str) -> bool:
        """Return whether a set's bfloat16 products are right; True if the set is not available.

        They must equal the portable set's up to float32 rounding, and a row's must not depend on other rows.
        """
        self.sync_threads()  # every thread has its own tiles
        for rows, n, k in ((1, 32, 64), (2, 300, 96), (9, 45, 67), (16, 70, 31), (17, 64, 352), (50, 33, 130)):
            noise = torch.Generator().manual_seed(k)
            x = torch.randn(rows, k, generator=noise)
            data = torch.randn(-(-n // 32), -(-k // 2), 32, 2, generator=noise).bfloat16()  # a packed weight
            weight = WeightRecord(data.data_ptr(), None, None, n, k)
            product_rows, single_row = self._multiply_with(name, weight, x), self._multiply_with(name, weight, x[-1:])
            expected = self._multiply_with("portable", weight, x)
            if product_rows is None or single_row is None or expected is None:
                return True
            dense = data.transpose(1, 2).reshape(len(data) * 32, -1)[:n, :k]
            size = x.abs() @ dense.abs().float().T  # scale of the rounding error
            is_close = ((product_rows - expected).abs() <= 4 * (k + 2) * 2.0**-24 * size).all()
            if not is_close or not torch.equal(product_rows[-1:], single_row):
                return False
        return True

    def _multiply_with(self, name: str, weight: WeightRecord, x: torch.Tensor) -> torch.Tensor | None:
        num_bytes = self.handle.fd_linear_scratch_with(name.encode(), weight, len(x))
        if num_bytes < 0:
            return None
        out, scratch = torch.full((len(x), weight.n), torch.nan), torch.empty(num_bytes, dtype=torch.uint8)
        product = LinearRecord(ctypes.pointer(weight), x.data_ptr(), out.data_ptr(), scratch.data_ptr(), len(x))
        return None if self.handle.fd_linear_with(name.encode(), product) else out

    def sync_threads(self) -> None:
        """Set the number of threads to torch's current number."""
        self.handle.fd_set_threads(torch.get_num_threads())


@cache
def load_library() -> NativeLibrary | None:
    """Load the native library; None, with one warning, if it was not built; None if it is switched off."""
    choice = os.environ.get(KERNELS_VARIABLE, "")
    if choice == "torch":
        return None
    if not build.LIBRARY.exists():
        warnings.warn(
            "Foredraft was installed without its native CPU kernels (no C compiler); decoding on CPU runs on torch's "
            "operators, several times slower. Install gcc and run: python -m foredraft.kernels.cpu.build",
            stacklevel=2,
        )
        return None
    found = _open_library(build.LIBRARY)
    found.select(choice)
    return found


def _open_library(path: Path) -> NativeLibrary:
    handle = ctypes.CDLL(str(path))
    if not _matches_sources(handle):
        raise ForedraftError(
            "the native kernels were built from other sources; run: python -m foredraft.kernels.cpu.build"
        )
    _declare_functions(handle)
    _declare_drafting(handle)
    share_threads(handle)
    return NativeLibrary(handle)


def _matches_sources(handle: ctypes.CDLL) -> bool:
    """Return whether a library was built from the sources here. An older one may lack any function, these two too."""
    if not hasattr(handle, "fd_fingerprint") or not hasattr(handle, "fd_sizeof"):
        return False
    handle.fd_fingerprint.restype, handle.fd_sizeof.restype = c_char_p, c_int64
    if handle.fd_fingerprint().decode() != build.compute_fingerprint():
        return False
    return all(handle.fd_sizeof(i) == ctypes.sizeof(record) for i, record in enumerate(RECORDS))


def _declare_functions(handle: ctypes.CDLL) -> None:
    handle.fd_selected.restype = c_char_p
    handle.fd_select.argtypes = [c_char_p]
    handle.fd_disable.argtypes = [c_char_p]
    handle.fd_disable.restype = None
    handle.fd_set_threads.argtypes = [c_int]
    handle.fd_use_openmp.argtypes = [c_void_p, c_void_p]
    handle.fd_decoder_scratch.argtypes = [POINTER(ModelRecord), POINTER(RowsRecord)]
    handle.fd_decoder_scratch.restype = c_int64
    handle.fd_decoder_forward.argtypes = [POINTER(ModelRecord), POINTER(RowsRecord), POINTER(PassRecord)]
    handle.fd_decoder_forward.restype = None
    handle.fd_linear_scratch.argtypes = [POINTER(WeightRecord), c_int]
    handle.fd_linear_scratch.restype = c_int64
    handle.fd_linear.argtypes = [POINTER(LinearRecord)]
    handle.fd_linear.restype = None
    handle.fd_linear_with.argtypes = [c_char_p, POINTER(LinearRecord)]
    handle.fd_linear_scratch_with.argtypes = [c_char_p, POINTER(WeightRecord), c_int]
    handle.fd_linear_scratch_with.restype = c_int64
    handle.fd_attend_scratch.argtypes = [POINTER(AttentionRecord), POINTER(RowsRecord)]
    handle.fd_attend_scratch.restype = c_int64
    handle.fd_attend.argtypes = [POINTER(AttentionRecord), POINTER(RowsRecord), c_void_p]
    handle.fd_attend.restype = None
    handle.fd_encdec_scratch.argtypes = [POINTER(Seq2SeqRecord), POINTER(RowsRecord), POINTER(RowsRecord)]
    handle.fd_encdec_scratch.restype = c_int64
    handle.fd_encdec_forward.argtypes = [
        POINTER(Seq2SeqRecord),
        POINTER(RowsRecord),
        POINTER(RowsRecord),
        POINTER(PassRecord),
    ]
    handle.fd_encdec_forward.restype = None
    handle.fd_mix.argtypes = [POINTER(MixingRecord)]
    handle.fd_mix.restype = None
    handle.fd_tune.argtypes = [TuningRecord * ROW_CLASSES]
    handle.fd_tune.restype = None
    handle.fd_read_memory.argtypes = [c_void_p, c_int64]
    handle.fd_read_memory.restype = c_uint32


def _declare_drafting(handle: ctypes.CDLL) -> None:
    """Declare the functions that sample, draft and verify."""
    handle.fd_sample.argtypes = [POINTER(SamplingRecord)]
    handle.fd_sample.restype = c_int
    handle.fd_walk_trees.argtypes = [POINTER(WalksRecord)]
    handle.fd_walk_trees.restype = c_int
    handle.fd_chain_scratch.argtypes = [POINTER(ModelRecord), POINTER(ChainRecord)]
    handle.fd_chain_scratch.restype = c_int64
    handle.fd_draft_chains.argtypes = [POINTER(ModelRecord), POINTER(ChainRecord), POINTER(PassRecord)]
    handle.fd_draft_chains.restype = c_int
    handle.fd_step_scratch.argtypes = [POINTER(StepNetworkRecord), c_int]
    handle.fd_step_scratch.restype = c_int64
    handle.fd_forward_step.argtypes = [POINTER(StepNetworkRecord), POINTER(StepPassRecord)]
    handle.fd_forward_step.restype = None
    handle.fd_step_chain_scratch.argtypes = [POINTER(StepNetworkRecord), POINTER(DraftsRecord)]
    handle.fd_step_chain_scratch.restype = c_int64
    handle.fd_draft_steps.argtypes = [POINTER(StepNetworkRecord), POINTER(DraftsRecord), POINTER(StepRootsRecord)]
    handle.fd_draft_steps.restype = c_int
    handle.fd_sum_masses.argtypes = [c_void_p, c_int, c_int64]
    handle.fd_sum_masses.restype = c_double
    handle.fd_divide_masses.argtypes = [c_void_p, c_int, c_int64, c_double, c_void_p]
    handle.fd_divide_masses.restype = None
    handle.fd_subtract_masses.argtypes = [c_void_p, c_double, c_void_p, c_int64, c_void_p]
    handle.fd_subtract_masses.restype = None
    handle.fd_sample_mass.argtypes = [c_void_p, c_int64, c_double, c_void_p]
    handle.fd_sample_mass.restype = c_int64
