"""Hidden states of a step for the drafter: all that it reads, or none while drafting rests."""

from foredraft.draft_length.policy import DraftLengthPolicy
from foredraft.drafters.spec import DrafterSpec
from foredraft.engine.scheduler import record_states
from foredraft.request import Batch


def choose_hidden_layers(batch: Batch, spec: DrafterSpec, length_policy: DraftLengthPolicy) -> tuple[int, ...]:
    """Return the layer boundaries whose hidden states the step collects, and record which requests lack them.

    Args:
        batch: requests of the step.
        spec: needs of the drafter.
        length_policy: decides whether the drafter observes the step (`needs_observation`).
    """
    if spec.missed_states == "forbidden":
        return spec.hidden_layers
    is_final = spec.missed_states == "end"
    is_useful = not is_final or not all(request.lacks_states for request in batch.requests)
    layers = spec.hidden_layers if is_useful and length_policy.needs_observation else ()
    record_states(batch, are_given=bool(layers), is_final=is_final)
    return layers
