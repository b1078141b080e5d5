"""Which of the target's states an EAGLE-3 head reads. Two conventions number them, one apart.

Ours, as in the authors' code, vLLM and speculators: boundary k = the residual stream after k layers. SGLang, SpecForge
and ModelOpt name the layer whose output it is, boundary k + 1, and keep it inside `eagle_config`.
"""

import logging
from itertools import pairwise
from typing import Any

from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.models.forward_batch import AFTER_FINAL_NORM

LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
log = logging.getLogger(__name__)


def choose_default_layers(num_layers: int) -> tuple[int, ...]:
    return (2, num_layers // 2, num_layers - 3)


def is_ascending(hidden_layers: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(hidden_layers))


def resolve_hidden_layers(
    claims: TensorClaims, config: dict[str, Any], num_layers: int, num_states: int
) -> tuple[int, ...]:
    """The `count` boundaries, ascending, of a target of `num_layers` layers. Raises ForedraftError."""
    taps, origin = _read_configured_layers(claims, config)
    if not taps:
        taps, origin = choose_default_layers(num_layers), "no layers in config.json, so 2, n // 2 and n - 3"
        if num_states != len(taps) or not is_ascending(taps):
            raise claims.refuse(
                f"config.json names no layers, and the default {list(taps)} for a target of {num_layers} layers is not "
                f"{num_states} ascending ones; write {LAYER_IDS_KEY} (boundaries) into it"
            )
    said = f"{origin} of a target of {num_layers} layers"
    for tap in taps:
        if taps.count(tap) > 1:
            raise claims.refuse(f"boundary {tap} occurs twice in {list(taps)} ({said}); each has to be another one")
        if not 0 <= tap <= num_layers:
            raise claims.refuse(f"boundary {tap} is out of range 0 to {num_layers} ({said}); is it for this target?")
    if not is_ascending(taps):
        raise claims.refuse(f"the boundaries {list(taps)} are not ascending ({said}); fc reads them in ascending order")
    if len(taps) != num_states:
        raise claims.refuse(
            f"fc.weight reads {num_states} states of the target, and there are {len(taps)} layers ({said})"
        )
    log.info("%s: reads the target at boundaries %s (%s)", claims.files.folder, list(taps), origin)
    return taps


def select_last_state(claims: TensorClaims) -> tuple[int, ...]:
    """Return the state that the target's lm_head reads, for a head without fc."""
    log.info("%s: reads the target's last state, after its final norm", claims.files.folder)
    return (AFTER_FINAL_NORM,)


def _read_configured_layers(claims: TensorClaims, config: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    """Return the layer boundaries that config.json names, and the key that names them."""
    nested = config.get("eagle_config") or {}
    top, inner = (
        _parse_layer_ids(claims, config.get(LAYER_IDS_KEY)),
        _parse_layer_ids(claims, nested.get(LAYER_IDS_KEY)),
    )
    shifted = tuple(i + 1 for i in inner)
    if top and inner and top != shifted:
        raise claims.refuse(
            f"{LAYER_IDS_KEY} names boundaries {list(top)}, and the one in eagle_config layer outputs "
            f"{list(inner)}, which are "
            f"boundaries {list(shifted)}; remove the wrong one from config.json"
        )
    if top:
        return top, f"{LAYER_IDS_KEY} {list(top)}"
    return shifted, f"the outputs of layers {list(inner)} in eagle_config"


def _parse_layer_ids(claims: TensorClaims, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise claims.refuse(f"{LAYER_IDS_KEY} in config.json has to be a list of layer numbers, not {value!r}")
    return tuple(value)
