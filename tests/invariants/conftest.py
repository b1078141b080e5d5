"""The pretended GPU around every test, if it is chosen, and no failures of drafters by the clock of a busy machine."""

from collections.abc import Iterator
from unittest import mock

import pytest

from foredraft.drafters import failure_backoff
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


@pytest.fixture(autouse=True)
def patient_sandbox() -> Iterator[None]:
    """Let a proposal take as long as the first ones: a machine may stop for a second."""
    with mock.patch.object(failure_backoff, "MIN_TIMEOUT", failure_backoff.TIMEOUT):
        yield
