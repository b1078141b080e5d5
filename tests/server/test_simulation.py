"""A server with simulated acceptance says so in every response, in its model list and in its metrics."""

from collections.abc import Iterator

import httpx
import pytest

from foredraft import simulate_acceptance
from tests.support.server.live_server import PLAIN_HTTP, RunningServer, make_small_llm, run_server

HEADER = "x-foredraft-simulated"
BODIES = {
    "/v1/completions": {"prompt": "the end", "max_tokens": 30, "ignore_eos": True, "seed": 1},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 30, "ignore_eos": True, "seed": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def simulated() -> Iterator[RunningServer]:
    with run_server(make_small_llm().with_drafter(simulate_acceptance(0.75), 4)) as found:
        yield found


@pytest.mark.parametrize("path", BODIES)
def test_a_response_names_the_simulation_and_its_rate(simulated: RunningServer, path: str):
    answer = simulated.post(path, BODIES[path] | {"speculative_metrics": True})
    assert answer.headers[HEADER] == "0.75"
    body = answer.json()
    assert (body["verification"], body["simulated_acceptance_rate"]) == ("simulated", 0.75)
    figures = body["metrics"]["speculative_decoding"]
    assert figures["simulated_acceptance_rate"] == 0.75
    assert figures["mean_acceptance_length"] > 1.5
    with httpx.stream("POST", simulated.url + path, json=BODIES[path] | {"stream": True}, **PLAIN_HTTP) as stream:
        assert stream.headers[HEADER] == "0.75"
        stream.read()
    assert all(chunk["simulated_acceptance_rate"] == 0.75 for chunk in simulated.chunks(path, **BODIES[path]))


@pytest.mark.parametrize("path", BODIES)
def test_a_request_with_a_rule_of_its_own_gets_the_target_s_text(
    simulated: RunningServer, server: RunningServer, path: str
):
    answer = simulated.post(path, BODIES[path] | {"verify": "match"})
    assert HEADER not in answer.headers
    assert "simulated_acceptance_rate" not in answer.json()
    assert answer.json()["choices"] == server.post_ok(path, **BODIES[path])["choices"]
    assert HEADER not in server.post(path, BODIES[path]).headers


def test_the_model_list_and_the_metrics_name_the_rate(simulated: RunningServer, server: RunningServer):
    [card] = simulated.get("/v1/models").json()["data"]
    assert (card["drafter"], card["simulated_acceptance_rate"]) == ("simulated", 0.75)
    assert simulated.metrics()["foredraft:simulated_acceptance_rate"] == 0.75
    assert "simulated_acceptance_rate" not in server.get("/v1/models").json()["data"][0]
    assert "foredraft:simulated_acceptance_rate" not in server.metrics()


def test_a_client_cannot_ask_for_it_and_a_grammar_is_refused_by_its_field(
    simulated: RunningServer, server: RunningServer
):
    for one in (simulated, server):
        refused = one.post("/v1/completions", {"prompt": "the", "verify": "simulated"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "verify")
    pytest.importorskip("llguidance")
    refused = simulated.post("/v1/completions", {"prompt": "the", "regex": "[0-9]+"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "regex")
    assert "'match'" in refused.json()["error"]["message"]
