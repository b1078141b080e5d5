"""Entry of a model in lists of models, in the format of OpenAI with some fields of vLLM."""

from typing import Any

from foredraft.server.service import Service


def build_model_card(service: Service, name: str) -> dict[str, Any]:
    """Build the entry of one name of a loaded model. Raises ApiError 503 while it is loaded."""
    rule = service.llm.rule
    rate = None if rule is None else rule.simulated_rate
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "foredraft",
        "root": service.settings.model_names[0],
        "parent": service.base_name,
        "max_model_len": service.max_length,
        "permission": [],
        "drafter": service.llm.drafter_name,
        **({} if rate is None else {"simulated_acceptance_rate": rate}),
    }
