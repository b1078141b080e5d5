"""Body of a request: strict JSON, checked against the model of its route."""

from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from foredraft.server.errors import ApiError
from foredraft.server.field_limits import validate_body
from foredraft.server.json_body import read
from foredraft.server.served_models import ServedModels

Body = TypeVar("Body", bound=BaseModel)


async def read_request(http: Request, models: ServedModels, model: type[Body]) -> Body:
    """Read the body of a POST request.

    Args:
        http: request, whose body was received.
        models: models of the server, for its limits and a thread for long bodies.
        model: class of the body.

    Raises:
        ApiError: 415 for another content type, 400 for a body that is not valid.
    """
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, "the body must be sent as Content-Type: application/json")
    body, limits = await http.body(), models.settings.limits
    pool = models.services[0].threads.text
    return await read(body, pool, limits.max_depth, lambda parsed: validate_body(model, parsed, limits))
