"""HTTP client of a server that runs the target."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foredraft.errors import ForedraftError

TIMEOUT = 600.0  # seconds of one request
RETRY_SECONDS = (1, 2, 5, 10, 20, 30, 60, 60, 60)  # waits between attempts while the server does not answer
RETRIED_STATUS = (429, 502, 503, 504)  # loading, full, or behind a proxy that has no server yet
MAX_ERROR_BYTES = 4096


@dataclass(frozen=True)
class TargetClient:
    """Client of one server.

    Attributes:
        url: address, such as http://localhost:8000.
        key: API key; None = none.
        sleep: waits some seconds between attempts.
    """

    url: str
    key: str | None = None
    sleep: Callable[[float], None] = time.sleep

    def get_json(self, path: str) -> Any:
        """GET a JSON value. Raises ForedraftError if the server does not answer, or refuses."""
        return json.loads(self._send(path, None))

    def post_json(self, path: str, body: Any) -> Any:
        """POST a JSON value and return the JSON of the response. Raises ForedraftError as `get_json`."""
        return json.loads(self._send(path, body))

    def post(self, path: str, body: Any) -> bytes:
        """POST a JSON value and return the bytes of the response. Raises ForedraftError as `get_json`."""
        return self._send(path, body)

    def _send(self, path: str, body: Any) -> bytes:
        """Send a request, again and again while the server does not answer."""
        headers = {"content-type": "application/json"} | (
            {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        )
        data = None if body is None else json.dumps(body).encode()
        for seconds in (*RETRY_SECONDS, None):
            request = urllib.request.Request(self.url.rstrip("/") + path, data, headers)
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                    return bytes(response.read())
            except urllib.error.HTTPError as error:
                reason = f"status {error.code}: {_read_message(error)}"
                if error.code not in RETRIED_STATUS:
                    raise ForedraftError(f"{self.url}{path} refused the request ({reason})") from None
            except OSError as error:  # URLError, resets and timeouts
                reason = str(getattr(error, "reason", error))
            if seconds is not None:
                self.sleep(seconds)
        raise ForedraftError(f"{self.url} does not answer ({reason}); start the server, and the same command goes on")


def check_url(url: str) -> None:
    """Raise ForedraftError for anything but an http or https address."""
    if not url.startswith(("http://", "https://")):
        raise ForedraftError(f"--target-url takes an address such as http://localhost:8000, got {url!r}")


def _read_message(error: urllib.error.HTTPError) -> str:
    """Read the message of an error in OpenAI's format."""
    text = error.read(MAX_ERROR_BYTES).decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text.partition("\n")[0][:200]
