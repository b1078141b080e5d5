"""The native library: found, loaded by raw pointers, and tied to torch's threads.

There is nothing to link: it takes addresses. The records mirror foredraft.h field by field.
"""

import ctypes
import os
import warnings
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch

from foredraft.errors import ForedraftError
from foredraft.kernels.cpu import build

CHOICE = "FOREDRAFT_KERNELS"  # an instruction set by name, or "torch" for none
SETS = ("amx", "avx512bf16", "avx512", "avx2", "portable")
TILED = "amx"


class Weight(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("kind", c_int32),
        ("group", c_int32),
    )


class Rows(ctypes.Structure):
    """fd_window: the rows of a pass."""

    _fields_ = (
        ("rows", c_int32),
        ("page_size", c_int32),
        ("num_logits", c_int32),
        ("longest", c_int32),
        ("tokens", c_void_p),
        ("write", c_void_p),
        ("pages", c_void_p),
        ("page_at", c_void_p),
        ("tails", c_void_p),
        ("tail_at", c_void_p),
        ("start", c_void_p),
        ("tail", c_void_p),
        ("logit_rows", c_void_p),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Weight),
        ("out", Weight),
        ("gate_up", Weight),
        ("down", Weight),
        ("sliding", c_int32),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in "layers hidden heads kv_heads head_dim rotary inner activation".split()),
        ("has_bf16_kv", c_int32),
        ("has_bf16_embedding", c_int32),
        ("front", c_int32),
        ("norm_before_residual", c_int32),
        *((name, c_float) for name in "eps scale softcap embedding_scale residual_scale logit_scale".split()),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("input_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("layer", POINTER(Layer)),
        ("join", Weight),
        ("head", Weight),
        ("adapter", POINTER(Layer)),
    )


class Pass(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("taps", c_void_p),
        ("num_taps", c_int32),
        ("inputs", c_void_p),
        ("features", c_void_p),
        ("logits", c_void_p),
        ("scratch", c_void_p),
    )


class Attention(ctypes.Structure):
    _fields_ = (
        ("query", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("out", c_void_p),
        *((name, c_int32) for name in "heads kv_heads head_dim has_bf16_kv sliding".split()),
        ("scale", c_float),
        ("softcap", c_float),
        ("bias", c_void_p),
        ("far", c_int32),
        ("places", c_void_p),
    )


class Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("shift", c_void_p))


class PairLayer(ctypes.Structure):
    _fields_ = (
        *((name, Norm) for name in "own_norm cross_norm inner_norm".split()),
        *((name, Weight) for name in "qkv out query cross_out wide narrow".split()),
        ("bias", c_void_p),
    )


class Pair(ctypes.Structure):
    """fd_pair: the decoder of an encoder-decoder model."""

    _fields_ = (
        *((name, c_int32) for name in "layers hidden heads head_dim inner activation".split()),
        *((name, c_int32) for name in "is_gated norms_after has_bf16_kv far is_encoder".split()),
        *((name, c_float) for name in "eps scale logit_scale".split()),
        ("norm", Norm),
        ("layer", POINTER(PairLayer)),
        ("head", Weight),
    )


class PairPass(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in "keys values cross_keys cross_values taps".split()),
        ("num_taps", c_int32),
        *((name, c_void_p) for name in "inputs features logits scratch".split()),
    )


class Product(ctypes.Structure):
    _fields_ = (
        ("weight", POINTER(Weight)),
        ("x", c_void_p),
        ("out", c_void_p),
        ("scratch", c_void_p),
        ("rows", c_int32),
    )


RECORDS = (Weight, Rows, Layer, Model, Pass, Attention, Product, PairLayer, Pair, PairPass)


@dataclass(frozen=True)
class Library:
    """Entry points of the loaded library. Calls release the interpreter's lock."""

    handle: ctypes.CDLL

    @property
    def instruction_set(self) -> str:
        return str(self.handle.fd_selected().decode())

    def select(self, name: str = "") -> None:
        """Use an instruction set by name; "" = the best there is. Raises ForedraftError where there is no such one."""
        if name in ("", TILED) and not self.has_right_tiles:
            self.handle.fd_forbid(TILED.encode())
        if self.handle.fd_select(name.encode()):
            known = ", ".join(SETS)
            raise ForedraftError(f"this processor has no {name!r} kernels; use one of {known} that it has, or torch")

    def has(self, name: str) -> bool:
        """Whether this processor runs an instruction set; leaves the best one selected."""
        self.select()
        found = bool(self.handle.fd_select(name.encode()) == 0)
        self.handle.fd_select(b"")
        return found

    @cached_property
    def has_right_tiles(self) -> bool:
        """False, and said so, if this processor has tiles that compute wrongly: ours have run in emulation only."""
        is_right = self._agrees(TILED)
        if not is_right:
            warnings.warn(
                f"the {TILED!r} kernels compute wrongly on this processor, and Foredraft does without them; please "
                "report it, with the processor's name",
                stacklevel=3,
            )
        return is_right

    def _agrees(self, name: str) -> bool:
        """Whether a set's bfloat16 products are the portable set's, to the rounding of float32, and a row's the same
        alone and among others; or there is no such set here."""
        self.follow_threads()  # every one of them has tiles of its own
        for rows, n, k in ((1, 32, 64), (2, 300, 96), (9, 45, 67), (16, 70, 31), (17, 64, 352), (50, 33, 130)):
            noise = torch.Generator().manual_seed(k)
            x = torch.randn(rows, k, generator=noise)
            data = torch.randn(-(-n // 32), -(-k // 2), 32, 2, generator=noise).bfloat16()  # a packed weight
            weight = Weight(data.data_ptr(), None, None, n, k)
            ours, alone = self._product_by(name, weight, x), self._product_by(name, weight, x[-1:])
            theirs = self._product_by("portable", weight, x)
            if ours is None or alone is None or theirs is None:
                return True
            dense = data.transpose(1, 2).reshape(len(data) * 32, -1)[:n, :k]
            size = x.abs() @ dense.abs().float().T  # what every product and every sum may round, relatively
            is_close = ((ours - theirs).abs() <= 4 * (k + 2) * 2.0**-24 * size).all()
            if not is_close or not torch.equal(ours[-1:], alone):
                return False
        return True

    def _product_by(self, name: str, weight: Weight, x: torch.Tensor) -> torch.Tensor | None:
        out = torch.full((len(x), weight.n), torch.nan)
        scratch = torch.empty(self.handle.fd_linear_scratch(weight, len(x)), dtype=torch.uint8)
        product = Product(ctypes.pointer(weight), x.data_ptr(), out.data_ptr(), scratch.data_ptr(), len(x))
        return None if self.handle.fd_linear_by(name.encode(), product) else out

    def follow_threads(self) -> None:
        """As many threads as torch uses now."""
        self.handle.fd_set_threads(torch.get_num_threads())


@cache
def library() -> Library | None:
    """The native library, or None (said once) where it was not built or is switched off."""
    choice = os.environ.get(CHOICE, "")
    if choice == "torch":
        return None
    if not build.LIBRARY.exists():
        warnings.warn(
            "Foredraft was installed without its native CPU kernels (no C compiler); decoding on CPU runs on torch's "
            "operators, several times slower. Install gcc and run: python -m foredraft.kernels.cpu.build",
            stacklevel=2,
        )
        return None
    found = _load(build.LIBRARY)
    found.select(choice)
    return found


def _load(path: Path) -> Library:
    handle = ctypes.CDLL(str(path))
    _declare(handle)
    is_foreign = any(handle.fd_sizeof(i) != ctypes.sizeof(record) for i, record in enumerate(RECORDS))
    if is_foreign or handle.fd_source().decode() != build.fingerprint():
        raise ForedraftError(
            "the native kernels were built from other sources; run: python -m foredraft.kernels.cpu.build"
        )
    share_threads(handle)
    return Library(handle)


def share_threads(handle: ctypes.CDLL) -> None:
    """Let the team be made of torch's threads, where they can be had."""
    runtime = _openmp()
    if runtime is not None:
        handle.fd_share(_address(runtime.GOMP_parallel), _address(runtime.omp_get_num_threads))


def _declare(handle: ctypes.CDLL) -> None:
    handle.fd_sizeof.restype = c_int64
    handle.fd_source.restype = c_char_p
    handle.fd_selected.restype = c_char_p
    handle.fd_select.argtypes = [c_char_p]
    handle.fd_forbid.argtypes = [c_char_p]
    handle.fd_forbid.restype = None
    handle.fd_set_threads.argtypes = [c_int]
    handle.fd_share.argtypes = [c_void_p, c_void_p]
    handle.fd_scratch.argtypes = [POINTER(Model), POINTER(Rows)]
    handle.fd_scratch.restype = c_int64
    handle.fd_forward.argtypes = [POINTER(Model), POINTER(Rows), POINTER(Pass)]
    handle.fd_forward.restype = None
    handle.fd_linear_scratch.argtypes = [POINTER(Weight), c_int]
    handle.fd_linear_scratch.restype = c_int64
    handle.fd_linear.argtypes = [POINTER(Product)]
    handle.fd_linear.restype = None
    handle.fd_linear_by.argtypes = [c_char_p, POINTER(Product)]
    handle.fd_attend_scratch.argtypes = [POINTER(Attention), POINTER(Rows)]
    handle.fd_attend_scratch.restype = c_int64
    handle.fd_attend.argtypes = [POINTER(Attention), POINTER(Rows), c_void_p]
    handle.fd_attend.restype = None
    handle.fd_pair_scratch.argtypes = [POINTER(Pair), POINTER(Rows), POINTER(Rows)]
    handle.fd_pair_scratch.restype = c_int64
    handle.fd_pair_forward.argtypes = [POINTER(Pair), POINTER(Rows), POINTER(Rows), POINTER(PairPass)]
    handle.fd_pair_forward.restype = None
    handle.fd_read.argtypes = [c_void_p, c_int64]
    handle.fd_read.restype = c_uint32


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded, if it speaks GNU's interface."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "libgomp" in line or "libomp" in line}
    for path in sorted(paths):
        runtime = ctypes.CDLL(path)
        if hasattr(runtime, "GOMP_parallel"):
            return runtime
    return None


def _address(function: "ctypes._NamedFuncPointer") -> int | None:
    return ctypes.cast(function, c_void_p).value
