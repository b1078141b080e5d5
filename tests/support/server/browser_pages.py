"""The playground in a browser: a server on a free port, a page that reports whatever goes wrong on it."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
).split()
CHROMIUM = shutil.which("chromium")


@contextmanager
def serve_app(app: FastAPI) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@contextmanager
def open_page(browser, url: str, **context):
    """Open a page that fails on console errors and on requests to another host."""

    def is_complaint(message) -> bool:
        # a refused request is logged by the browser itself; what the page makes of it is tested
        return message.type in ("error", "warning") and "Failed to load" not in message.text

    context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **context})
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda m: wrong.append(m.text) if is_complaint(m) else None)
    page.on("request", lambda r: None if r.url.startswith(url) else wrong.append(f"request to {r.url}"))
    page.goto(url)
    yield page
    assert wrong == []
    context.close()


def run(page, prompt: str, **fields: str) -> None:
    page.fill("#prompt", prompt)
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("body:not(.busy)")


def styles(page, selector: str, *names: str) -> tuple[str, ...]:
    return tuple(
        page.eval_on_selector(selector, "(e, names) => names.map((name) => getComputedStyle(e)[name])", list(names))
    )
