"""Loading of the native library, its records and its use of torch's threads.

The library takes addresses, so it links to nothing. The records mirror foredraft.h field by field.
"""

import ctypes
import os
import warnings
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch

from foredraft.errors import ForedraftError
from foredraft.kernels.cpu import build
from foredraft.kernels.cpu.openmp import share_threads

KERNELS_VARIABLE = "FOREDRAFT_KERNELS"  # name of an instruction set, or "torch" for no native kernels
ROW_CLASSES = 3  # of tunings: products of 1 row, of 2 to 4, of more
INSTRUCTION_SETS = (*build.list_machine_sets(), "portable")  # of this architecture, the best first
TILE_SET = "amx"


class WeightRecord(ctypes.Structure):
    """Packed matrix (fd_weight)."""

    _fields_ = (
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("kind", c_int32),
        ("group", c_int32),
    )


class RowsRecord(ctypes.Structure):
    """Rows of a forward pass (fd_rows)."""

    _fields_ = (
        ("num_rows", c_int32),
        ("page_size", c_int32),
        ("num_logits", c_int32),
        ("max_keys", c_int32),
        ("tokens", c_void_p),
        ("write_slots", c_void_p),
        ("pages", c_void_p),
        ("page_offset", c_void_p),
        ("path_slots", c_void_p),
        ("path_offset", c_void_p),
        ("num_committed", c_void_p),
        ("path_length", c_void_p),
        ("logit_rows", c_void_p),
    )


class LayerRecord(ctypes.Structure):
    """Decoder layer (fd_layer)."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        *((name, WeightRecord) for name in "qkv out gate_up down".split()),
        ("sliding_window", c_int32),
        ("positions", c_int32),
    )


class ModelRecord(ctypes.Structure):
    """Decoder, or the decoder of a drafter (fd_model)."""

    _fields_ = (
        *((name, c_int32) for name in "layers hidden heads kv_heads head_dim rotary inner activation".split()),
        ("has_bf16_kv", c_int32),
        ("has_bf16_embedding", c_int32),
        ("input_kind", c_int32),
        ("norm_before_residual", c_int32),
        ("is_parallel", c_int32),
        ("has_joint_head_norm", c_int32),
        *((name, c_float) for name in "eps scale softcap embedding_scale residual_scale logit_scale".split()),
        ("logit_softcap", c_float),
        *((name, c_void_p) for name in "embedding norm input_norm norm_bias cos sin local_cos local_sin".split()),
        ("layer", POINTER(LayerRecord)),
        ("fc", WeightRecord),
        ("head", WeightRecord),
        ("adapter", POINTER(LayerRecord)),
    )


class PassRecord(ctypes.Structure):
    """Inputs and outputs of a forward pass (fd_pass)."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("cross_keys", c_void_p),
        ("cross_values", c_void_p),
        ("hidden_layers", c_void_p),
        ("hidden_layer_count", c_int32),
        ("has_bf16_features", c_int32),
        ("inputs", c_void_p),
        ("features", c_void_p),
        ("logits", c_void_p),
        ("scratch", c_void_p),
    )


class AttentionRecord(ctypes.Structure):
    """Inputs and output of one attention call (fd_attention)."""

    _fields_ = (
        ("query", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("out", c_void_p),
        *((name, c_int32) for name in "heads kv_heads head_dim has_bf16_kv sliding_window".split()),
        ("scale", c_float),
        ("softcap", c_float),
        ("bias", c_void_p),
        ("max_distance", c_int32),
        ("query_rows", c_void_p),
    )


class NormRecord(ctypes.Structure):
    """Weights of a norm (fd_norm)."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class Seq2SeqLayerRecord(ctypes.Structure):
    """Decoder layer with cross-attention (fd_encdec_layer)."""

    _fields_ = (
        *((name, NormRecord) for name in "self_norm cross_norm mlp_norm".split()),
        *((name, WeightRecord) for name in "qkv self_out cross_query cross_out mlp_in mlp_out".split()),
        ("bias", c_void_p),
    )


class Seq2SeqRecord(ctypes.Structure):
    """Decoder of an encoder-decoder model (fd_encdec)."""

    _fields_ = (
        *((name, c_int32) for name in "layers hidden heads head_dim inner activation".split()),
        *((name, c_int32) for name in "is_gated is_post_norm has_bf16_kv max_distance is_encoder".split()),
        *((name, c_float) for name in "eps scale logit_scale".split()),
        ("norm", NormRecord),
        ("layer", POINTER(Seq2SeqLayerRecord)),
        ("head", WeightRecord),
    )


class LinearRecord(ctypes.Structure):
    """Arguments of a product of activations and a packed matrix (fd_linear_args)."""

    _fields_ = (
        ("weight", POINTER(WeightRecord)),
        ("x", c_void_p),
        ("out", c_void_p),
        ("scratch", c_void_p),
        ("rows", c_int32),
    )


class SettingsRecord(ctypes.Structure):
    """Sampling parameters of a row (fd_settings)."""

    _fields_ = tuple((name, c_double) for name in "temperature top_k top_p min_p typical_p".split())


class SamplingRecord(ctypes.Structure):
    """Arguments of one call of the sampler (fd_sampling)."""

    _fields_ = (
        *((name, c_void_p) for name in "logits rows settings keys probs tokens masses ids counts".split()),
        ("stride", c_int64),
        ("margin", c_double),
        *((name, c_int32) for name in "num_rows vocab is_bf16".split()),
    )


class ChainRecord(ctypes.Structure):
    """Chains of draft tokens (fd_chain)."""

    _fields_ = (
        ("first", POINTER(RowsRecord)),
        *((name, c_void_p) for name in "settings keys depths starts slots pages page_offset".split()),
        *((name, c_void_p) for name in "end_ids end_offset uses_q token_ids q tokens counts".split()),
        ("margin", c_double),
        *((name, c_int32) for name in "num_drafts max_depth columns vocab max_keys page_size".split()),
    )


class TuningRecord(ctypes.Structure):
    """Choices that change the time of products alone (fd_tuning)."""

    _fields_ = (("prefetch", c_int32), ("vectors", c_int32), ("chunk_bytes", c_int32))


RECORDS = (
    WeightRecord,
    RowsRecord,
    LayerRecord,
    ModelRecord,
    PassRecord,
    AttentionRecord,
    LinearRecord,
    Seq2SeqLayerRecord,
    Seq2SeqRecord,
    SettingsRecord,
    SamplingRecord,
    ChainRecord,
    TuningRecord,
)


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
        out = torch.full((len(x), weight.n), torch.nan)
        scratch = torch.empty(self.handle.fd_linear_scratch(weight, len(x)), dtype=torch.uint8)
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
    handle.fd_sample.argtypes = [POINTER(SamplingRecord)]
    handle.fd_sample.restype = c_int
    handle.fd_chain_scratch.argtypes = [POINTER(ModelRecord), POINTER(ChainRecord)]
    handle.fd_chain_scratch.restype = c_int64
    handle.fd_draft_chains.argtypes = [POINTER(ModelRecord), POINTER(ChainRecord), POINTER(PassRecord)]
    handle.fd_draft_chains.restype = c_int
    handle.fd_sum_masses.argtypes = [c_void_p, c_int, c_int64]
    handle.fd_sum_masses.restype = c_double
    handle.fd_divide_masses.argtypes = [c_void_p, c_int, c_int64, c_double, c_void_p]
    handle.fd_divide_masses.restype = None
    handle.fd_subtract_masses.argtypes = [c_void_p, c_double, c_void_p, c_int64, c_void_p]
    handle.fd_subtract_masses.restype = None
    handle.fd_sample_mass.argtypes = [c_void_p, c_int64, c_double, c_void_p]
    handle.fd_sample_mass.restype = c_int64
    handle.fd_tune.argtypes = [TuningRecord * ROW_CLASSES]
    handle.fd_tune.restype = None
    handle.fd_read_memory.argtypes = [c_void_p, c_int64]
    handle.fd_read_memory.restype = c_uint32
