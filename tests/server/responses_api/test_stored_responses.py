"""Stored responses over HTTP: retrieval, pages of items, chains, deletion, eviction, owners and models."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from foredraft.server.served_models import ServedModels
from foredraft.server.service import Service
from foredraft.server.settings import ServerSettings
from tests.support.server.live_server import CHATML, NAME, RunningServer, make_fresh_llm, run_models, run_server

PATH = "/v1/responses"
BOUND = 4


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server of two models, so that a response has to be that of its model."""
    settings = ServerSettings(model_names=(NAME,), chat_template=CHATML, stored_responses=BOUND)
    services = [Service(settings), Service(ServerSettings(model_names=("other",), chat_template=CHATML))]
    for service in services:
        service.open(make_fresh_llm())
    with run_models(ServedModels(settings, services)) as found:
        yield found


def make_client(server: RunningServer, key: str = "mine") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def create(client: openai.OpenAI, text: str = "the end", **body: Any) -> Any:
    return client.responses.create(**{"model": NAME, "input": text, "max_output_tokens": 3, "temperature": 0} | body)


def refuse(action: Any, *args: Any, **options: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        action(*args, **options)
    return caught.value


def test_a_response_is_retrieved_as_it_was_sent_and_deleted(server: RunningServer):
    with make_client(server) as client:
        made = create(client, metadata={"a": "b"})
        assert client.responses.retrieve(made.id) == made
        with client.responses.stream(model=NAME, input="a", extra_body={"regex": "[ab]{3}"}) as stream:
            streamed = stream.get_final_response()
        assert client.responses.retrieve(streamed.id).output_text == streamed.output_text
        client.responses.delete(made.id)
        assert refuse(client.responses.retrieve, made.id).status_code == 404
        assert refuse(client.responses.delete, made.id).status_code == 404


def test_a_chain_is_the_whole_conversation_even_if_its_beginning_is_deleted(server: RunningServer):
    with make_client(server) as client:
        first = create(client, "one", instructions="Be brief.")
        second = create(client, "two", previous_response_id=first.id)
        client.responses.delete(first.id)
        third = create(client, [{"role": "user", "content": "three"}], previous_response_id=second.id)
        items = client.responses.input_items.list(third.id, order="asc").data
        texts = [item.content[0].text for item in items]
        assert texts == ["one", first.output_text, "two", second.output_text, "three"]
        history = [{"role": item.role, "content": text} for item, text in zip(items, texts, strict=True)]
        whole = create(client, history, store=False)
        assert (whole.output_text, whole.usage.input_tokens) == (third.output_text, third.usage.input_tokens)
        with_instructions = create(client, history, store=False, instructions="Be brief.")
        assert with_instructions.usage.input_tokens > third.usage.input_tokens  # those of a response are not inherited


def test_items_come_in_pages(server: RunningServer):
    with make_client(server) as client:
        made = create(client, [{"role": "user", "content": str(i)} for i in range(5)])
        pages = client.responses.input_items.list(made.id, limit=2)
        assert (len(pages.data), pages.has_next_page()) == (2, True)
        assert [item.content[0].text for item in pages] == ["4", "3", "2", "1", "0"]
        body = server.get(
            f"{PATH}/{made.id}/input_items?order=asc&limit=5", headers={"Authorization": "Bearer mine"}
        ).json()
        assert (body["first_id"], body["has_more"]) == (body["data"][0]["id"], False)
    for query in ("limit=0", "order=up", "x=1", f"after={made.id}"):
        answer = server.get(f"{PATH}/{made.id}/input_items?{query}", headers={"Authorization": "Bearer mine"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_the_least_recently_used_response_leaves_first(server: RunningServer):
    evicted = server.metrics()["foredraft:stored_responses_evicted_total"]
    with make_client(server) as client:
        made = [create(client) for _ in range(BOUND)]
        client.responses.retrieve(made[0].id)
        create(client, store=False)
        create(client)
        for response, status in ((made[0], 200), (made[1], 404), (made[2], 200)):
            answer = server.get(f"{PATH}/{response.id}", headers={"Authorization": "Bearer mine"})
            assert answer.status_code == status
        metrics = server.metrics()
        assert metrics["foredraft:stored_responses"] == BOUND
        assert metrics["foredraft:stored_responses_evicted_total"] > evicted
        assert metrics["foredraft:stored_response_bytes"] > BOUND * 500
        error = refuse(create, client, previous_response_id=made[1].id)
        assert error.status_code == 404
        assert error.body["param"] == "previous_response_id"
        assert f"the {BOUND} last used ones, at most 64 MiB" in error.body["message"]


def test_another_key_has_other_responses(server: RunningServer):
    """Even under the same id, which a client may choose."""
    with make_client(server) as client, make_client(server, "theirs") as other:
        mine = create(client, "one", extra_body={"request_id": "same"})
        assert refuse(other.responses.retrieve, mine.id).status_code == 404
        assert refuse(other.responses.delete, mine.id).status_code == 404
        assert refuse(create, other, previous_response_id=mine.id).status_code == 404
        theirs = create(other, "two", extra_body={"request_id": "same"})
        assert theirs.id == mine.id
        assert client.responses.retrieve(mine.id) == mine
        assert httpx.get(f"{server.url}{PATH}/{mine.id}").status_code == 404


def test_a_response_is_continued_by_its_model(server: RunningServer):
    with make_client(server) as client:
        made = create(client, model="other")
        error = refuse(create, client, previous_response_id=made.id)
        assert (error.status_code, error.body["param"]) == (400, "previous_response_id")
        assert "of the model 'other'" in error.body["message"]
        assert create(client, model="other", previous_response_id=made.id).status in ("completed", "incomplete")


def test_a_server_without_a_store_says_so():
    settings = ServerSettings(model_names=(NAME,), chat_template=CHATML, stored_responses=0)
    with run_server(make_fresh_llm(), settings) as server, make_client(server) as client:
        made = create(client)
        assert made.store is False
        for action in (client.responses.retrieve, client.responses.delete):
            assert "stores no responses" in refuse(action, made.id).body["message"]
        assert refuse(create, client, previous_response_id=made.id).status_code == 404
        error = refuse(create, client, store=True)
        assert (error.status_code, error.body["param"]) == (400, "store")
