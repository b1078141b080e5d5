"""A hub id without a network: the error comes at once, and a cached model loads; loopback only, nothing is fetched."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import transformers as hf

from foredraft.errors import ForedraftError
from foredraft.files import hub
from foredraft.models.loading import load_model
from tests.support.families import TINY

CPU = torch.device("cpu")
COMMIT = "0" * 40


def set_hub(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Let the hub's library believe that the hub is a port of this machine."""
    home = f"http://127.0.0.1:{port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", home)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", home + "/{repo_id}/resolve/{revision}/{filename}"
    )


@pytest.fixture
def waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """An empty cache; the seconds that the hub's library would have waited between its requests."""
    waits: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return waits


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # without listen(): every connection is refused
        set_hub(monkeypatch, closed.getsockname()[1])
        yield


class NotFound(BaseHTTPRequestHandler):
    requests: list[str]

    def do_HEAD(self) -> None:
        self.requests.append(self.path)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths that were requested from a hub that has no model."""
    requests: list[str] = []
    handler = type("Fresh", (NotFound,), {"requests": requests})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        set_hub(monkeypatch, server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield requests
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "no-such-model"])
def test_a_mistyped_name_without_a_network_is_refused_without_waiting(name: str, waits: list[float]) -> None:
    with pytest.raises(ForedraftError, match=f"{name} is not in the local cache and could not be fetched"):
        load_model(name, "auto", CPU)
    assert waits == []


@pytest.mark.usefixtures("unreachable")
def test_a_cached_model_needs_no_answer(tmp_path: Path, waits: list[float]) -> None:
    cached = tmp_path / "cache/models--owner--model"
    snapshot = cached / "snapshots" / COMMIT
    hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)).save_pretrained(snapshot)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(COMMIT)
    # If peft is installed, transformers looks for an adapter. At the first download the hub's library notes that the
    # repository has none.
    no_exist = cached / ".no_exist" / COMMIT
    no_exist.mkdir(parents=True)
    (no_exist / "adapter_config.json").touch()
    hub.check_reachable("owner/model", "config.json")
    load_model("owner/model", "auto", CPU)
    with pytest.raises(ForedraftError, match="could not be fetched"):
        hub.check_reachable("owner/model", "other.json")
    assert waits == [], waits


@pytest.mark.usefixtures("waits")
def test_an_answer_of_the_hub_is_explained_as_before(requests: list[str]) -> None:
    hub.check_reachable("owner/modle", "config.json")
    assert requests == ["/owner/modle/resolve/main/config.json"]
    with pytest.raises(ForedraftError, match="owner/modle is neither a local folder nor a model on the hub"):
        load_model("owner/modle", "auto", CPU)


def test_a_name_that_is_no_hub_id_is_left_to_the_loader() -> None:
    hub.check_reachable("no such name", "config.json")
