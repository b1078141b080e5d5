"""One server for the tests that only ask it things."""

from collections.abc import Iterator

import pytest

from serving import Running, running


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running() as found:
        yield found
