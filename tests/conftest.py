"""Settings that all tests share, and the cases that `make test` leaves out."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.support.crash_reports import KEY, CrashReports, write_crashes
from tests.support.guarded_scratch import guard_scratch
from tests.support.sample_table import SAMPLES
from tests.support.selection import COLLECTED, MARK, WIDE_MARK, divide_cases

# tests run beside each other: one thread each; and no deadline, for no test measures time
torch.set_num_threads(1)
# Without a GPU the Triton kernels run in triton's interpreter. It is chosen when triton is imported, by transformers.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
settings.register_profile("foredraft", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("foredraft")


@pytest.hookimpl(trylast=True)  # after pytest's own fault handler
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(CrashReports())
    elif KEY in config.workerinput:
        write_crashes(config.workerinput[KEY])


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = tuple(items)
    for mark, cases in zip((MARK, WIDE_MARK), divide_cases(items, SAMPLES), strict=True):
        for item in cases:
            item.add_marker(mark)


@pytest.fixture(autouse=True, scope="session")
def exact_dots() -> Iterator[None]:
    """Rows of products in triton's interpreter do not depend on each other, on any processor."""
    from tests.support.gpu_cases import DEVICE, explain_skip

    if explain_skip() is not None or DEVICE != "cpu":
        yield
        return
    from tests.support.exact_dots import make_dots_exact

    with make_dots_exact():
        yield


@pytest.fixture(autouse=True)
def check_scratch() -> Iterator[None]:
    """No native call of any test writes behind its scratch memory, even where its error would be handled."""
    with guard_scratch() as overrun:
        yield
    assert not overrun, f"written behind blocks of {overrun} bytes"
