"""Record of a stored response, which begins with the conversation of the response that it continues."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class StoredResponse:
    """Response of one client. It is compared by identity."""

    id: str
    owner: bytes  # hash of the client's API key
    model: str
    parent: "StoredResponse | None"  # response that it continues
    input_items: bytes  # JSON list of its own items
    body: bytes  # JSON of the response

    @property
    def num_bytes(self) -> int:
        """Bytes without those of the earlier responses."""
        return len(self.input_items) + len(self.body)

    @property
    def has_images(self) -> bool:
        """Whether images are among the items of the conversation. Quotation marks of texts are escaped in JSON."""
        return any(b'"type": "input_image"' in response.input_items for response in self.chain)

    @property
    def chain(self) -> list["StoredResponse"]:
        """Responses of the conversation, from the first one to this one."""
        found, response = [], self
        while response is not None:
            found.append(response)
            response = response.parent  # type: ignore[assignment]
        return found[::-1]

    @property
    def input_rows(self) -> list[dict[str, Any]]:
        """Its own input items."""
        rows: list[dict[str, Any]] = json.loads(self.input_items)
        return rows

    @property
    def output_rows(self) -> list[dict[str, Any]]:
        """Its output items."""
        rows: list[dict[str, Any]] = json.loads(self.body)["output"]
        return rows

    def list_conversation(self) -> list[dict[str, Any]]:
        """List the items that the model was given: those of the earlier responses with their outputs, and its own."""
        rows = []
        for response in self.chain:
            rows += response.input_rows
            rows += [] if response is self else response.output_rows
        return rows
