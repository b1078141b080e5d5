"""Triton's interpreter with matrix products whose rows do not depend on each other.

NumPy leaves a product to a BLAS, some of whose kernels sum a row in another order at another place of the matrix: those
for AVX2 do. The tensor cores of a GPU do not, and the kernels rely on it.
"""

from typing import Any
from unittest import mock

import numpy as np
from triton.runtime import interpreter


def make_dots_exact() -> Any:
    """Return a context in which `tl.dot` sums every row in the same order."""

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        kind = d.data.dtype
        # without `optimize`, einsum is a loop of NumPy's own
        dots = np.einsum("...mk,...kn->...mn", a.data.astype(kind), b.data.astype(kind), optimize=False)
        return interpreter.TensorHandle(dots + d.data, d.dtype.scalar)

    return mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot)
