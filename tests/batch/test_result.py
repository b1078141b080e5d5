"""Results: OpenAI's format, and nothing in them that depends on time or on other requests."""

import json

from foredraft.batch.line import BatchLine
from foredraft.batch.result import LineResult

BODY = {
    "id": "cmpl-1", "created": 12345, "choices": [],
    "usage": {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}},
}  # fmt: skip


def decode(result):
    data = result.encode(created=7)
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1
    return json.loads(data)


def test_a_response_has_the_fields_of_openai_with_the_time_of_the_job():
    result = LineResult(BatchLine(3, "id ü"), 200, BODY)
    assert decode(result) == {
        "id": "batch_req_3",
        "custom_id": "id ü",
        "response": {
            "status_code": 200,
            "request_id": "batch_req_3",
            "body": {
                "id": "cmpl-1",
                "created": 7,
                "choices": [],
                "usage": {"prompt_tokens": 2, "completion_tokens": 3},
            },
        },
        "error": None,
    }
    assert (result.is_failed, result.num_tokens) == (False, 3)


def test_an_error_of_the_server_is_a_response_and_failed():
    result = LineResult(BatchLine(3, "x"), 400, {"error": {"message": "no"}})
    assert decode(result)["response"]["body"] == {"error": {"message": "no"}}
    assert (result.is_failed, result.num_tokens) == (True, 0)


def test_a_line_that_is_no_request_has_no_response():
    value = decode(LineResult(BatchLine(3, "x", error="bad"), None, {}))
    assert (value["response"], value["error"]) == (None, {"code": "invalid_line", "message": "bad"})
