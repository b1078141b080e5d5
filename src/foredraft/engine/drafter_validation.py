"""Validation of drafters and of their specs."""

from collections.abc import Callable

from foredraft.drafters.interface import Drafter
from foredraft.drafters.spec import MISSED_STATES, TOKEN_STEPS, DrafterSpec
from foredraft.errors import ForedraftError
from foredraft.kv.draft_kv import DraftKV
from foredraft.models.forward_batch import AFTER_FINAL_NORM

SPEC_EXAMPLE = "self.spec = DrafterSpec(max_nodes=4)"  # with `from foredraft.drafters.spec import DrafterSpec`


def validate_drafter(drafter: Drafter, num_layers: int) -> Drafter:
    """Check a drafter object from the caller before it is used, and return it.

    Args:
        drafter: object with the interface of a drafter.
        num_layers: layers of the target.

    Raises:
        ForedraftError: a member is missing, or the spec is invalid.
    """
    try:
        _check_members(drafter)
        validate_spec(drafter.spec, num_layers)
    except Exception as error:  # untrusted code may raise any exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ForedraftError(f"the drafter {type(drafter).__name__} cannot be used: {reason}") from error
    return drafter


def validate_spec(spec: DrafterSpec, num_layers: int | None) -> None:
    """Check the types and ranges of a spec.

    Args:
        spec: spec of an untrusted drafter.
        num_layers: layers of the target; None = `hidden_layers` is not compared with them.

    Raises:
        TypeError: a value has another type, or is negative.
        ValueError: a boundary that the target does not have.
    """
    if type(spec) is not DrafterSpec:
        raise TypeError(f"spec must be a DrafterSpec, got {type(spec).__name__}; write `{SPEC_EXAMPLE}`")
    if type(spec.max_nodes) is not int or spec.max_nodes < 0:
        raise TypeError(f"max_nodes must be an integer, 0 or more, got {spec.max_nodes!r}")
    if type(spec.num_target_candidates) is not int or spec.num_target_candidates < 0:
        raise TypeError(f"num_target_candidates must be an integer, 0 or more, got {spec.num_target_candidates!r}")
    _check_hidden_layers(spec.hidden_layers, num_layers)
    if spec.missed_states not in MISSED_STATES:
        raise TypeError(f"missed_states must be one of {', '.join(MISSED_STATES)}, got {spec.missed_states!r}")
    if spec.token_steps not in TOKEN_STEPS:
        raise TypeError(f"token_steps must be one of {', '.join(TOKEN_STEPS)}, got {spec.token_steps!r}")
    if spec.draft_kv is not None and not isinstance(spec.draft_kv, DraftKV):
        raise TypeError(f"draft_kv must be a DraftKV or None, got {type(spec.draft_kv).__name__}")
    flags = {
        "needs_target_argmax": spec.needs_target_argmax,
        "decides_length": spec.decides_length,
        "shares_target_kv": spec.shares_target_kv,
        "reads_commits": spec.reads_commits,
        "reads_plain_commits": spec.reads_plain_commits,
        "is_token_source": spec.is_token_source,
        "samples_drafts": spec.samples_drafts,
    }
    for name, value in flags.items():
        if type(value) is not bool:
            raise TypeError(f"{name} must be True or False, got {value!r}")


def _check_hidden_layers(layers: tuple[int, ...], num_layers: int | None) -> None:
    if type(layers) is not tuple or not all(type(layer) is int for layer in layers):
        raise TypeError(f"hidden_layers must be a tuple of integers, got {layers!r}")
    if num_layers is not None and not all(layer == AFTER_FINAL_NORM or 0 <= layer <= num_layers for layer in layers):
        raise ValueError(
            f"hidden_layers must be boundaries of the target, {AFTER_FINAL_NORM} or 0 to {num_layers}, got {layers}"
        )


def _check_members(drafter: Drafter) -> None:
    """Raise TypeError if the object has not the four members of a drafter."""
    members: dict[str, Callable[[], object]] = {
        "spec": lambda: drafter.spec,
        "propose": lambda: drafter.propose,
        "observe": lambda: drafter.observe,
        "forget": lambda: drafter.forget,
    }
    missing = []
    for name, read in members.items():
        try:
            read()
        except AttributeError:
            missing.append(name)
    if missing:
        example = f"; write `{SPEC_EXAMPLE}` in its __init__" if missing == ["spec"] else ""
        raise TypeError(
            f"it has no {', '.join(missing)}{example}; give the name of a method, a dict of options, or an object with "
            f"{', '.join(members)}"
        )
