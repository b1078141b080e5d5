"""Outputs of the target that the drafter gets in a step: all that it reads, or none while drafting rests."""

from foredraft.draft_length.policy import DraftLengthPolicy
from foredraft.drafters.spec import DrafterSpec
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.engine.scheduler import record_states
from foredraft.engine.target_output import TargetOutput
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree


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


def show_commit(
    drafter: SandboxedDrafter,
    batch: Batch,
    tree: TokenTree,
    commit: Commit,
    output: TargetOutput,
    length_policy: DraftLengthPolicy,
) -> bool:
    """Show the commit of a step to the drafter, with the outputs of the target that it reads.

    Returns:
        Whether the drafter was given all of them.
    """
    spec = drafter.spec
    has_states = output.features is not None
    with_tokens = spec.needs_tokens and (has_states or _reads_tokens(spec, batch, length_policy))
    drafter.observe(batch, output.attach_to(commit, tree, spec, with_tokens))
    has_tokens = with_tokens or not spec.needs_tokens or spec.token_steps == "drafted"
    return has_tokens and (has_states or not spec.hidden_layers)


def _reads_tokens(spec: DrafterSpec, batch: Batch, length_policy: DraftLengthPolicy) -> bool:
    """Return whether the drafter reads the target's tokens after this step."""
    if spec.token_steps == "drafted":
        return any(batch.granted_nodes)
    return spec.token_steps == "all" or length_policy.needs_observation
