"""One shared server for the tests that only send requests to it."""

from collections.abc import Iterator

import pytest

from tests.support.server.browser_pages import CHROMIUM, FLAGS, open_page, serve_app
from tests.support.server.live_server import RunningServer, run_server
from tests.support.server.playground_fakes import FakeServer


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with run_server() as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; install the package chromium to test the page")
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served():
    fake = FakeServer()
    with serve_app(fake.app()) as url:
        yield fake, url


@pytest.fixture
def fake(served):
    served[0].bodies.clear()
    served[0].key = None
    return served[0]


@pytest.fixture
def page(browser, served, fake):
    with open_page(browser, served[1]) as page:
        yield page
