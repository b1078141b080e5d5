"""Every operation of the OpenAPI document with values made from it, good ones and bad ones: the answers must be those
that it documents. FOREDRAFT_EXAMPLES: how many per operation (50)."""

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from foredraft.server.settings import ServerSettings
from tests.support.server.live_server import CHATML, NAME, RunningServer, make_fresh_llm, run_server

EXAMPLES = int(os.environ.get("FOREDRAFT_EXAMPLES", "50"))
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance, content_type_conformance]
OPERATIONS = {
    "GET /health", "GET /ready", "GET /metrics", "GET /version", "GET /v1/models", "GET /v1/models/{name}",
    "GET /tokenizer_info", "POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "POST /detokenize",
    "POST /v1/responses", "GET /v1/responses/{name}", "DELETE /v1/responses/{name}",
    "GET /v1/responses/{name}/input_items", "POST /v1/messages", "POST /v1/messages/count_tokens",
}  # fmt: skip
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def described() -> Iterator[tuple[RunningServer, schemathesis.BaseSchema]]:
    with run_server(
        make_fresh_llm(), ServerSettings(model_names=(NAME,), chat_template=CHATML, request_timeout=20)
    ) as server:
        yield server, schemathesis.openapi.from_url(server.url + "/openapi.json")


def operation_of(schema: schemathesis.BaseSchema, label: str) -> schemathesis.APIOperation:
    return next(found.ok() for found in schema.get_all_operations() if found.ok().label == label)


def test_no_operation_is_left_out(described):
    _, schema = described
    assert {found.ok().label for found in schema.get_all_operations()} == OPERATIONS


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_answers_are_as_documented(described, label: str):
    server, schema = described
    operation = operation_of(schema, label)
    made = [operation.as_strategy(generation_mode=mode) for mode in MODES]
    counts: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
        phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.one_of(made))
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and label.startswith("POST /v1"):
            case.body.setdefault("max_tokens", 4)  # the text's length is no matter here, and time is
        answer = case.call(timeout=60)
        counts[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    ask()
    assert server.is_idle()
    server.engine.scheduler.check_integrity()
    assert server.get("/health").status_code == 200
    assert counts
