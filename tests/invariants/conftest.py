"""The pretended GPU around every test, if it is chosen."""

from collections.abc import Iterator

import pytest

from tests.support.devices import IS_PRETENDED
from tests.support.pretend_gpu import pretend_gpu


@pytest.fixture(autouse=True, scope="session")
def pretended_gpu() -> Iterator[None]:
    """Make tensors of the device cuda pretended ones."""
    if not IS_PRETENDED:
        yield
        return
    with pretend_gpu():
        yield
