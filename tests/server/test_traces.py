"""/v1/traces: states and distributions of the target, computed beside running requests."""

import threading

import pytest
import torch
from safetensors.torch import load

from foredraft.server.settings import ServerSettings
from foredraft.train.trace import Tracer
from tests.support.server.live_server import CHATML, NAME, make_small_llm, run_server

ROWS = [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def traced():
    with run_server(settings=ServerSettings(model_names=(NAME,), chat_template=CHATML, has_traces=True)) as server:
        yield server


@pytest.mark.parametrize(("layers", "top"), [([0, -1], None), ([1], 5), ([], 3)])
def test_the_traces_are_those_of_the_target(traced, layers, top):
    answer = traced.post("/v1/traces", {"tokens": ROWS, "hidden_layers": layers, "top": top})
    features, probs = Tracer(make_small_llm().target, layers, top).run_target(torch.tensor(ROWS))
    tensors = load(answer.content)
    assert torch.equal(tensors["features"], features)
    assert torch.equal(tensors["logprobs"], probs.logprobs)
    assert ("token_ids" in tensors) == (top is not None)


def test_requests_that_run_meanwhile_are_not_changed(traced):
    def complete():
        return traced.complete(max_tokens=40, temperature=0)["choices"][0]["text"]

    expected, texts = complete(), []
    threads = [threading.Thread(target=lambda: texts.append(complete())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        assert traced.post("/v1/traces", {"tokens": ROWS * 8, "hidden_layers": [1]}).status_code == 200
    for thread in threads:
        thread.join()
    assert texts == [expected] * 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tokens": []}, "tokens"),
        ({"tokens": [[]]}, "tokens"),
        ({"tokens": [[1], [1, 2]]}, "same length"),
        ({"tokens": [[10**6]]}, "outside the vocabulary"),
        ({"tokens": [[-1]]}, "tokens"),
        ({"tokens": [[1]], "hidden_layers": [99]}, "hidden layer 99 is not a boundary"),
        ({"tokens": [[1]], "hidden_layers": [-2]}, "hidden_layers"),
        ({"tokens": [[1]], "top": 0}, "top"),
        ({"tokens": [[1] * 100] * 200}, "at most 16384 ids"),
        ({"tokens": [[1] * 10_000]}, "the model takes"),
        ({"tokens": [[1]], "layers": [1]}, "layers"),
    ],
)
def test_wrong_requests_are_refused(traced, body, message):
    answer = traced.post("/v1/traces", body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_there_are_no_traces_unless_asked_for():
    with run_server() as server:
        assert server.post("/v1/traces", {"tokens": ROWS}).status_code == 404
        assert server.get("/v1/traces").status_code == 404
