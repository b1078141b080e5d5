"""RMS norms of ordinary models on a GPU, by one kernel each."""

from typing import Any

from foredraft.kernels.gpu.checks import DTYPES
from foredraft.kernels.gpu.loading import explain_missing_kernels, load_exact_kernels
from foredraft.models.exact_modules import replace_rms_norms
from foredraft.models.packed_linear import copy_structure


def fuse_norms(model: Any, is_owned: bool) -> Any:
    """Replace the RMS norms of a model by those of one kernel each, if its device has the kernels.

    Args:
        model: transformers model that does not run as native code.
        is_owned: whether to change the model itself. Otherwise a copy around the same tensors is changed.

    Returns:
        The model, or its copy.
    """
    if model.device.type != "cuda" or model.dtype not in DTYPES or explain_missing_kernels(model.device) is not None:
        return model
    model = model if is_owned else copy_structure(model)
    replace_rms_norms(model, load_exact_kernels())
    return model
