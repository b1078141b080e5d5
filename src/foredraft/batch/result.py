"""Result of one line of a batch, in OpenAI's format."""

import json
from dataclasses import dataclass
from typing import Any

from foredraft.batch.line import BatchLine

OK = 200


@dataclass(frozen=True)
class LineResult:
    """Response to one line.

    Attributes:
        line: the line.
        status: HTTP status; None = the line is no request.
        body: body of the response, or of the error.
    """

    line: BatchLine
    status: int | None
    body: dict[str, Any]

    @property
    def is_failed(self) -> bool:
        return self.status != OK

    @property
    def num_tokens(self) -> int:
        """Tokens of the output."""
        return int(self.body.get("usage", {}).get("completion_tokens", 0))

    def encode(self, created: int) -> bytes:
        """Encode as a line of JSON.

        Args:
            created: time of the response, in seconds since 1970. A constant of the job, so that the result of a line
                does not depend on when it ran.
        """
        request_id = f"batch_req_{self.line.number}"
        response = None
        if self.status is not None:
            response = {"status_code": self.status, "request_id": request_id, "body": self._build_body(created)}
        error = None if response is not None else {"code": "invalid_line", "message": self.line.error}
        value = {"id": request_id, "custom_id": self.line.custom_id, "response": response, "error": error}
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"

    def _build_body(self, created: int) -> dict[str, Any]:
        """Build the body without what depends on time, or on the requests that ran before."""
        body = dict(self.body)
        if "created" in body:
            body["created"] = created
        if "usage" in body:
            body["usage"] = {name: value for name, value in body["usage"].items() if name != "prompt_tokens_details"}
        return body
