"""Requests and responses of /v1/completions with token ids, which Foredraft and vLLM share."""

from typing import Any

from foredraft.errors import ForedraftError
from foredraft.outputs import Completion
from foredraft.sampling.params import Sampling

COMPLETIONS_PATH = "/v1/completions"


def make_body(ids: list[int], sampling: Sampling) -> dict[str, Any]:
    """Make the body of a request for one completion; temperature, seed and max_tokens are used."""
    return {
        "prompt": ids, "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "seed": sampling.seed,
        "return_token_ids": True,
    }  # fmt: skip


def parse_completion(url: str, ids: list[int], response: Any) -> Completion:
    """Parse the response to such a request.

    Args:
        url: address of the server, for errors.
        ids: token ids of the prompt.
        response: JSON of the response.

    Raises:
        ForedraftError: the response has no token ids.
    """
    [choice] = response["choices"]
    if choice.get("token_ids") is None:
        raise ForedraftError(
            f"{url} sends no token_ids with its completions; give a `foredraft serve`, or a vLLM that has "
            "return_token_ids"
        )
    return Completion(choice["text"], choice["token_ids"], choice["finish_reason"], prompt_token_ids=ids)
