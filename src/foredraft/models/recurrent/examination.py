"""Checks of a model with recurrent layers: where its states are, and whether our passes compute what it computes."""

import inspect
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from foredraft.kv.state_pool import RECURRENT, StatePool
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.recurrent.state_probe import StateProbe

OTHER_PLACE = "keeps its recurrent state in another place than transformers' Cache, so a draft cannot be rolled back"
# Parts of the layer types of recurrent layers. "hybrid" layers have attention and a recurrent part.
_RECURRENT_LAYER_WORDS = ("mamba", "linear_attention", "recurrent", "conv", "rwkv", "ssm", "hybrid")
# Allowed error of the logits, in units of their standard deviation times the square root of the dtype's epsilon.
MAX_LOGIT_ERROR = 2.0
MAX_COMPARED_TOKEN = 1 << 10  # token ids of the comparison lie below this
# The comparison: two chunks, then a draft tree in which node 1 is a wrong token.
_CHUNK, _PAGE_SIZE, _WRONG_NODE = 5, 4, 1
_PARENTS, _DEPTHS = (-1, 0, 0, 2, 3), (0, 1, 1, 2, 3)
_NUM_TOKENS = 2 * _CHUNK + len(_PARENTS) - 1
_PAGES = range(1, 2 + _NUM_TOKENS // _PAGE_SIZE)
_LARGE = 100.0  # change of a state that shows in every result


def list_layer_kinds(model: Any) -> list[str]:
    """List the kinds of a model's layers as its configuration names them; empty if it does not."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return [str(kind) for kind in kinds]


def has_recurrent_layers(model: Any) -> bool:
    """Whether a model declares a recurrent state, or layers that have one."""
    is_declared = bool(getattr(model, "_is_stateful", False))
    return is_declared or any(word in kind for kind in list_layer_kinds(model) for word in _RECURRENT_LAYER_WORDS)


def find_cache_obstacle(model: Any) -> str | None:
    """Return why the recurrent layers of a model cannot get their states from us; None if nothing is known."""
    parameters = inspect.signature(model.forward).parameters
    if "cache" not in parameters:
        if "past_key_values" in parameters:
            return "they need a release of transformers whose models take `cache`, such as 5.24"
        return OTHER_PLACE
    # A class of the model's own file: it has its own methods, and the engine does not know them.
    kinds = [kind for kind in typing.get_args(parameters["cache"].annotation) if kind is not type(None)]
    return None if all(issubclass(kind, Cache) for kind in kinds) else OTHER_PLACE


def find_state_obstacle(probe: StateProbe) -> str | None:
    """Return why the states that a probe has found cannot be rolled back; None if they can."""
    if not probe.shapes:
        return OTHER_PLACE
    for mixer, layer in probe.mixers.items():
        if any(module is attending for module in mixer.modules() for attending in probe.attending):
            return (
                f"keeps a recurrent state inside the attention of layer {layer} ({type(mixer).__name__}), which cannot "
                "run draft node by draft node"
            )
    return None


@torch.no_grad()
def compute_expected_logits(model: Any) -> Tensor:
    """Compute the logits [N, V] of the compared tokens by the model itself, without cache and without packed rows."""
    tokens = torch.tensor([_choose_tokens(model)], device=model.device)
    return model(input_ids=tokens, use_cache=False).logits[0].double()  # type: ignore[no-any-return]


@torch.no_grad()
def find_continues_chunks(
    model: Any, probe: StateProbe, states: StatePool, run: Callable[[ForwardBatch], Tensor]
) -> bool:
    """Find whether a recurrence depends on the state before a chunk of several tokens.

    In some layers of transformers it does so for single tokens only. A large change of the state must change the
    logits; their difference from the model's own may be too small to see in low precision.

    Args:
        model: transformers model.
        probe: states and layers of the model.
        states: pool of the passes, empty.
        run: our forward pass, from a forward batch to its logits [R, V].
    """
    first_layers = {type(mixer): layer for mixer, layer in reversed(probe.mixers.items())}  # by class of the layer
    keys = [key for key in probe.shapes if key.kind == RECURRENT and key.layer in first_layers.values()]
    first, second = [
        ForwardBatch.from_spans([span], _PAGE_SIZE, model.device) for span in _make_chunks(_choose_tokens(model))
    ]
    run(first)
    state = states.get_table(_PAGE_SIZE).find(_PAGES, _CHUNK)
    for key in keys:
        before = run(second)
        states.tensors[key][state] += _LARGE
        if torch.equal(run(second), before):
            return False
    return True


@torch.no_grad()
def measure_error(model: Any, expected: Tensor, run: Callable[[ForwardBatch], Tensor]) -> float:
    """Measure how far our passes are from the model's own: two prompt chunks, then a draft tree with a wrong token.

    Args:
        model: transformers model.
        expected: logits of `compute_expected_logits`.
        run: our forward pass, from a forward batch to its logits [R, V], with an empty pool.

    Returns:
        Root mean square of the difference, in units of the allowed error: up to 1, the passes agree.
    """
    tokens = _choose_tokens(model)
    nodes = tokens[2 * _CHUNK :]
    nodes.insert(_WRONG_NODE, tokens[0])
    spans = (*_make_chunks(tokens), Span(_PAGES, 2 * _CHUNK, nodes, _DEPTHS, _PARENTS))
    ours = torch.cat([run(ForwardBatch.from_spans([span], _PAGE_SIZE, model.device)) for span in spans]).double()
    ours = torch.cat([ours[: 2 * _CHUNK + _WRONG_NODE], ours[2 * _CHUNK + _WRONG_NODE + 1 :]])
    # The root mean square, not the maximum: rounding may flip a near tie between experts and change one row.
    precision = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    return float((ours - expected).square().mean().sqrt() / (MAX_LOGIT_ERROR * precision**0.5 * expected.std()))


def _make_chunks(tokens: list[int]) -> tuple[Span, Span]:
    """Make two prompt chunks, the second one after the state of the first."""
    first, second, num_settled = tokens[:_CHUNK], tokens[_CHUNK : 2 * _CHUNK], _CHUNK - 1
    return (
        Span(_PAGES, 0, first, range(_CHUNK), num_settled=num_settled),
        Span(_PAGES, _CHUNK, second, range(_CHUNK), num_settled=num_settled),
    )


def _choose_tokens(model: Any) -> list[int]:
    """Choose distinct tokens: those of the prompt, and of the right path of the draft."""
    max_token = min(model.config.get_text_config().vocab_size, MAX_COMPARED_TOKEN)
    return [(i * 7 + 3) % max_token for i in range(_NUM_TOKENS)]
