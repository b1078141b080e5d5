"""Exact targets: a row's bits depend on its own request alone, so plain and speculative decoding are bit-equal.

Native code on the CPU keeps this promise by itself. On a GPU the linear layers and norms of transformers' modules are
replaced, and a model with any other sum over numbers is refused.
"""

from collections.abc import Sequence
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.checks import DTYPES
from foredraft.kernels.gpu.loading import explain_missing_kernels, load_exact_kernels
from foredraft.models.compatibility import AttentionCall, probe_attention
from foredraft.models.exact_modules import EXACT_MODULES, replace_modules
from foredraft.models.native.decoder import explain_unsupported
from foredraft.models.packed_linear import copy_structure
from foredraft.models.row_independence import find_dependent_operator

REMEDY = "leave exact (--exact) out, and output equals that of plain decoding up to near ties"


def make_exact(model: Any, name: str, is_fused: bool, is_owned: bool, calls: Sequence[AttentionCall]) -> Any:
    """Replace the linear layers and norms of a model on a GPU by exact ones.

    Args:
        model: transformers model that does not run as native code.
        name: name of the model in errors.
        is_fused: whether native code was allowed, for the reason.
        is_owned: whether to change the model itself. Otherwise a copy around the same tensors is changed.
        calls: attention of its layers.

    Returns:
        The model, or its copy.

    Raises:
        ForedraftError: the model cannot be exact; the message has the reason and what to do.
    """
    if model.device.type == "cpu":
        reason: str | None = _explain_cpu_obstacle(model, is_fused)
    else:
        reason = _explain_obstacle(model, calls)
    if reason is None:
        model = model if is_owned else copy_structure(model)
        replace_modules(model, load_exact_kernels())
        found = find_dependent_operator(model, EXACT_MODULES, probe_attention)
        reason = None if found is None else f"{found}, which may depend on the other rows of a pass"
    if reason is not None:
        raise make_exact_error(name, reason)
    return model


def _explain_cpu_obstacle(model: Any, is_fused: bool) -> str:
    """Return why a model on the CPU is not exact."""
    if not is_fused:
        return "on the CPU only native code is, and fused=False (--no-fused) switches it off"
    return f"on the CPU only native code is, and it does not run as native code ({explain_unsupported(model)})"


def _explain_obstacle(model: Any, calls: Sequence[AttentionCall]) -> str | None:
    """Return why a model cannot be exact, as far as it shows without its operators."""
    if getattr(model.config, "quantization_config", None) is not None:
        return "its checkpoint is quantised, and products of its weights are not exact"
    if model.dtype not in DTYPES:
        return f"the kernels take bfloat16, float16 and float32, and its weights are {model.dtype}"
    if not calls:
        return "it runs on its own attention, whose sums depend on the pass"
    obstacle = next((call.kernel_obstacle for call in calls if call.kernel_obstacle is not None), None)
    if obstacle is not None:
        return f"its attention does not run on the Triton kernel ({obstacle})"
    reason = explain_missing_kernels(model.device)
    return None if reason is None else f"the Triton kernels do not run ({reason})"


def make_exact_error(name: str, reason: str) -> ForedraftError:
    """Make the error for a target that cannot be exact."""
    return ForedraftError(f"{name} cannot be exact: {reason}; {REMEDY}")
