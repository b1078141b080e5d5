"""Hidden layers of the target that an EAGLE-3 head reads, as config.json names them.

Two conventions differ by one. Boundaries: boundary k is the residual stream after k layers, as in this project, the
authors' code, vLLM and speculators. Layer outputs: the output of layer k is boundary k + 1, as in SGLang, SpecForge and
ModelOpt, which store their list inside `eagle_config`.
"""

import logging
from itertools import pairwise
from typing import Any

from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.models.forward_batch import AFTER_FINAL_NORM

LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
log = logging.getLogger(__name__)


def choose_default_layers(num_layers: int) -> tuple[int, ...]:
    """Return the default boundaries: 2, n // 2 and n - 3 for a target of n layers."""
    return (2, num_layers // 2, num_layers - 3)


def is_ascending(hidden_layers: tuple[int, ...]) -> bool:
    """Check that every boundary is larger than the one before it."""
    return all(a < b for a, b in pairwise(hidden_layers))


def resolve_hidden_layers(
    claims: TensorClaims, config: dict[str, Any], num_layers: int, num_states: int
) -> tuple[int, ...]:
    """Return the boundaries of the target that a head reads: those in config.json, or the default.

    Args:
        claims: Tensors of the folder, for error messages.
        config: Content of config.json.
        num_layers: Layers of the target.
        num_states: States that fc.weight reads.

    Returns:
        `num_states` boundaries in ascending order.

    Raises:
        ForedraftError: if a boundary is repeated or out of range, or if order or number are wrong.
    """
    boundaries, origin = _read_configured_layers(claims, config)
    if not boundaries:
        boundaries, origin = choose_default_layers(num_layers), "no layers in config.json, so 2, n // 2 and n - 3"
        if num_states != len(boundaries) or not is_ascending(boundaries):
            raise claims.refuse(
                f"config.json names no layers, and the default {list(boundaries)} for a target of {num_layers} layers "
                f"is not {num_states} ascending ones; write {LAYER_IDS_KEY} (boundaries) into it"
            )
    source = f"{origin} of a target of {num_layers} layers"
    for boundary in boundaries:
        if boundaries.count(boundary) > 1:
            raise claims.refuse(
                f"boundary {boundary} occurs twice in {list(boundaries)} ({source}); each boundary must be different"
            )
        if not 0 <= boundary <= num_layers:
            raise claims.refuse(
                f"boundary {boundary} is out of range 0 to {num_layers} ({source}); is it for this target?"
            )
    if not is_ascending(boundaries):
        raise claims.refuse(
            f"the boundaries {list(boundaries)} are not ascending ({source}); fc reads them in ascending order"
        )
    if len(boundaries) != num_states:
        raise claims.refuse(
            f"fc.weight reads {num_states} states of the target, and there are {len(boundaries)} layers ({source})"
        )
    log.info("%s: reads the target at boundaries %s (%s)", claims.files.folder, list(boundaries), origin)
    return boundaries


def select_last_state(claims: TensorClaims) -> tuple[int, ...]:
    """Return the state that the target's lm_head reads, for a head without fc."""
    log.info("%s: reads the target's last state, after its final norm", claims.files.folder)
    return (AFTER_FINAL_NORM,)


def _read_configured_layers(claims: TensorClaims, config: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    """Return the boundaries that config.json names, and a description of the key; () if it names none."""
    nested = config.get("eagle_config") or {}
    boundaries, layer_outputs = (
        _parse_layer_ids(claims, config.get(LAYER_IDS_KEY)),
        _parse_layer_ids(claims, nested.get(LAYER_IDS_KEY)),
    )
    shifted = tuple(i + 1 for i in layer_outputs)
    if boundaries and layer_outputs and boundaries != shifted:
        raise claims.refuse(
            f"{LAYER_IDS_KEY} names boundaries {list(boundaries)}, and the one in eagle_config layer outputs "
            f"{list(layer_outputs)}, which are boundaries {list(shifted)}; remove the wrong one from config.json"
        )
    if boundaries:
        return boundaries, f"{LAYER_IDS_KEY} {list(boundaries)}"
    return shifted, f"the outputs of layers {list(layer_outputs)} in eagle_config"


def _parse_layer_ids(claims: TensorClaims, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise claims.refuse(f"{LAYER_IDS_KEY} in config.json has to be a list of layer numbers, not {value!r}")
    return tuple(value)
