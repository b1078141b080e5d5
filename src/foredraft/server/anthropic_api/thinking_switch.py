"""The field `thinking` of a request as variables of the chat template."""

from typing import Any

from foredraft.server.anthropic_api.schema import ThinkingOptions
from foredraft.server.errors import ApiError
from foredraft.server.service import Service

SWITCHES = ("enable_thinking", "thinking")  # variables by which templates turn reasoning on and off
BUDGET = "thinking_budget"  # variable by which templates tell the model how long it may reason


def read_thinking(options: ThinkingOptions | None, service: Service) -> dict[str, Any]:
    """Read the variables of the chat template that the field `thinking` sets.

    Without the field, and with "adaptive", the template and the model decide.

    Raises:
        ApiError: the model cannot reason, or cannot stop to.
    """
    if options is None or options.type == "adaptive":
        return {}
    known = service.chat_template.variables
    switches = [name for name in SWITCHES if name in known]
    can_reason = service.dialect.reasoning is not None
    if options.type == "disabled":
        if can_reason and not switches:
            message = "thinking: the chat template of this model always reasons; leave thinking out"
            raise ApiError(400, message, "thinking")
        return dict.fromkeys(switches, False)
    if not can_reason and not switches:
        message = 'thinking: this model has no reasoning; leave thinking out, or send {"type": "disabled"}'
        raise ApiError(400, message, "thinking")
    budget = {BUDGET: options.budget_tokens} if BUDGET in known else {}
    return dict.fromkeys(switches, True) | budget
