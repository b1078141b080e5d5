"""Which of the target's states an EAGLE-3 head reads. Two conventions number them, one apart.

Ours, as in the authors' code, vLLM and speculators: boundary k = the residual stream after k layers. SGLang, SpecForge
and ModelOpt name the layer whose output it is, boundary k + 1, and keep it inside `eagle_config`.
"""

import logging
from itertools import pairwise
from typing import Any

from foredraft.checkpoints.claims import Claims
from foredraft.models.window import NORMED

IDS = "eagle_aux_hidden_state_layer_ids"
log = logging.getLogger(__name__)


def default_taps(num_layers: int) -> tuple[int, ...]:
    return (2, num_layers // 2, num_layers - 3)


def is_ascending(taps: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(taps))


def resolve(claims: Claims, config: dict[str, Any], num_layers: int, count: int) -> tuple[int, ...]:
    """The `count` boundaries, ascending, of a target of `num_layers` layers. Raises ForedraftError."""
    taps, origin = _given(claims, config)
    if not taps:
        taps, origin = default_taps(num_layers), "no layers in config.json, so 2, n // 2 and n - 3"
        if count != len(taps) or not is_ascending(taps):
            raise claims.refuse(
                f"config.json names no layers, and the default {list(taps)} for a target of {num_layers} layers is not "
                f"{count} ascending ones; write {IDS} (boundaries) into it"
            )
    said = f"{origin} of a target of {num_layers} layers"
    for tap in taps:
        if taps.count(tap) > 1:
            raise claims.refuse(f"boundary {tap} occurs twice in {list(taps)} ({said}); each has to be another one")
        if not 0 <= tap <= num_layers:
            raise claims.refuse(f"boundary {tap} is out of range 0 to {num_layers} ({said}); is it for this target?")
    if not is_ascending(taps):
        raise claims.refuse(f"the boundaries {list(taps)} are not ascending ({said}); fc reads them in ascending order")
    if len(taps) != count:
        raise claims.refuse(f"fc.weight reads {count} states of the target, and there are {len(taps)} layers ({said})")
    log.info("%s: reads the target at boundaries %s (%s)", claims.files.folder, list(taps), origin)
    return taps


def last_state(claims: Claims) -> tuple[int, ...]:
    """Of a head without fc: what the target's own lm_head reads."""
    log.info("%s: reads the target's last state, after its final norm", claims.files.folder)
    return (NORMED,)


def _given(claims: Claims, config: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    """What config.json names, as boundaries, and where it says so."""
    nested = config.get("eagle_config") or {}
    top, inner = _ids(claims, config.get(IDS)), _ids(claims, nested.get(IDS))
    shifted = tuple(i + 1 for i in inner)
    if top and inner and top != shifted:
        raise claims.refuse(
            f"{IDS} names boundaries {list(top)}, and the one in eagle_config layer outputs {list(inner)}, which are "
            f"boundaries {list(shifted)}; remove the wrong one from config.json"
        )
    if top:
        return top, f"{IDS} {list(top)}"
    return shifted, f"the outputs of layers {list(inner)} in eagle_config"


def _ids(claims: Claims, given: Any) -> tuple[int, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in given):
        raise claims.refuse(f"{IDS} in config.json has to be a list of layer numbers, not {given!r}")
    return tuple(given)
