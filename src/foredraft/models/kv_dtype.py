"""Keys and values of a target in fewer bits than its own dtype."""

from dataclasses import replace

from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel
from foredraft.models.native.decoder import explain_unsupported

AUTO, INT8 = "auto", "int8"
KV_DTYPES = (AUTO, INT8)


def check_kv_dtype(kv_dtype: str, num_processes: int) -> None:
    """Raise ForedraftError if the dtype of keys and values is unknown, or impossible with several processes."""
    if kv_dtype not in KV_DTYPES:
        raise ForedraftError(f"unknown kv_dtype {kv_dtype!r:.80}; use {' or '.join(KV_DTYPES)}")
    if kv_dtype != AUTO and num_processes > 1:
        raise ForedraftError("kv_dtype='int8' runs in one process; leave it or tensor_parallel_size out")


def apply_kv_dtype(model: HFModel, kv_dtype: str) -> HFModel:
    """Return the target with keys and values of a dtype. Its pool must be empty.

    Args:
        model: target, just wrapped.
        kv_dtype: "auto" = that of the model, or "int8".

    Raises:
        ForedraftError: the model does not run as native code, which alone has int8 keys and values.
    """
    if kv_dtype == AUTO:
        return model
    if model.fused is not None:
        return replace(model, fused=model.fused.with_int8_kv())
    if model.model.config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    else:
        reason = explain_unsupported(model.model) or "fused=False, --no-fused"
    raise ForedraftError(
        f"kv_dtype='int8' is for decoder-only models that run as native code on the CPU, and {model.name} does not "
        f"({reason}); leave kv_dtype (--kv-dtype) out"
    )
