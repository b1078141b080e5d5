"""Recognition of the server at an address."""

from collections.abc import Callable, Mapping
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.train.remote.client import TargetClient
from foredraft.train.remote.foredraft_server import ForedraftServer
from foredraft.train.remote.server import TargetServer
from foredraft.train.remote.vllm_server import VllmServer

MODELS_PATH = "/v1/models"
Maker = Callable[[TargetClient, Mapping[str, Any]], TargetServer]  # of a client and the entry of a model
MAKERS: Mapping[str, Maker] = {  # by owned_by of the model
    "foredraft": lambda client, card: ForedraftServer(client),
    "vllm": VllmServer.from_card,
}


def connect_server(client: TargetClient) -> TargetServer:
    """Find out which engine the server is.

    Args:
        client: client of the server.

    Raises:
        ForedraftError: the server does not answer, or is of another kind.
    """
    card = _read_card(client)
    make = MAKERS.get(str(card.get("owned_by")))
    if make is None:
        raise ForedraftError(
            f"the server at {client.url} is neither of Foredraft nor of vLLM (its model belongs to "
            f"{card.get('owned_by')!r}); start `foredraft serve --traces`, or vLLM"
        )
    return make(client, card)


def _read_card(client: TargetClient) -> dict[str, Any]:
    """Return the first model that the server lists."""
    try:
        return dict(client.get_json(MODELS_PATH)["data"][0])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ForedraftError(
            f"{client.url}{MODELS_PATH} lists no model; give the address of `foredraft serve --traces`, or of vLLM"
        ) from None
