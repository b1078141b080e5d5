"""Routes of other kinds of models: an error in OpenAI's shape that says what this server is for."""

import openai
import pytest

from tests.support.server.live_server import NAME, RunningServer

PATHS = {
    "/v1/embeddings": "no embeddings",
    "/v1/rerank": "no reranking",
    "/v1/score": "no scores of text pairs",
    "/v1/audio/speech": "no speech and transcription",
    "/v1/audio/transcriptions": "no speech and transcription",
    "/v1/images/generations": "no images",
    "/v1/images/edits": "no images",
    "/v1/moderations": "no moderation",
    "/v1/conversations": "previous_response_id",
}


@pytest.mark.parametrize("path", PATHS)
def test_the_error_names_what_is_missing_and_what_there_is(server: RunningServer, path: str):
    for answer in (server.post(path, {"input": "a"}), server.get(path)):
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"], error["param"]) == (404, "not_found_error", 404, None)
        assert PATHS[path] in error["message"]
        assert "v1/chat/completions" in error["message"]


def test_a_response_cannot_be_cancelled(server: RunningServer):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    with client, pytest.raises(openai.NotFoundError, match="stream them instead"):
        client.responses.cancel("resp_1")


def test_a_name_that_only_begins_alike_is_an_unknown_route(server: RunningServer):
    for path in ("/v1/embeddingsx", "/v1/image", "/v1/audiobooks"):
        assert server.post(path, {}).json()["error"]["message"] == "there is no such route"


def test_the_sdk_does_not_repeat_the_request(server: RunningServer):
    """A status from 500 up would make it try again."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        with pytest.raises(openai.NotFoundError, match="this server generates text and has no embeddings"):
            client.embeddings.create(model=NAME, input="a")
        with pytest.raises(openai.NotFoundError, match="has no images"):
            client.images.generate(model=NAME, prompt="a")
