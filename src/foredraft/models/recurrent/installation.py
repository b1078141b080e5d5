"""Preparation of a causal LM for its passes, with states for its recurrent layers if it has any."""

from typing import Any

from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kv.pool import KVPool
from foredraft.kv.state_pool import StatePool
from foredraft.models import attention
from foredraft.models.compatibility import REMEDY, CausalExamination
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.packed_pass import ModulePass
from foredraft.models.recurrent.examination import compute_expected_logits, find_continues_chunks, measure_error
from foredraft.models.recurrent.mixers import install_mixers
from foredraft.models.recurrent.native_mixer import build_native_mixers
from foredraft.models.recurrent.state_pass import StatePass
from foredraft.models.recurrent.state_probe import StateProbe


def prepare_pass(
    model: Any, name: str, examination: CausalExamination, is_native: bool = False
) -> tuple[StatePool | None, ModulePass]:
    """Set the attention of a model, and let its recurrent layers run on packed rows.

    Args:
        model: transformers model.
        name: name of the model in errors.
        examination: how it runs.
        is_native: whether recurrent layers may run by the native kernel. Default False.

    Returns:
        An empty pool of states, or None if the model has no recurrent layers; and its pass.

    Raises:
        ForedraftError: its recurrent layers compute something else on packed rows.
    """
    probe = examination.states
    if probe is None or not probe.shapes:  # attention alone, as some models of a family with recurrent layers
        examination.module_pass.prepare(model)
        return None, examination.module_pass
    module_pass = StatePass(build_native_mixers(probe.mixers.items(), model.dtype) if is_native else {})
    states = _install_states(model, name, probe, module_pass)
    module_pass.prepare(model)
    return states, module_pass


def _install_states(model: Any, name: str, probe: StateProbe, module_pass: StatePass) -> StatePool:
    """Let the recurrent layers of a model run on packed rows, and check that they compute the same.

    Returns:
        An empty pool.

    Raises:
        ForedraftError: they do not, because a layer keeps a state that was not found, or mixes rows.
    """
    implementations = attention.read_implementations(model)
    install_mixers(probe.list_mixers())
    shapes = dict(probe.shapes)
    for native in module_pass.natives.values():
        shapes |= native.shapes
    states = StatePool(shapes, model.device)
    pool = KVPool.for_device(model.device, states=states)

    def run(forward_batch: ForwardBatch) -> Tensor:
        return module_pass.run(model, pool, forward_batch)[0]

    try:
        model.set_attn_implementation("eager")  # the model may have been wrapped before
        expected = compute_expected_logits(model)
        module_pass.prepare(model)
        states.continues_chunks = find_continues_chunks(model, probe, states, run)
        pool.clear()
        error = measure_error(model, expected, run)
    finally:
        model.set_attn_implementation(implementations)
    if not error <= 1:
        raise ForedraftError(
            f"{name} ({type(model).__name__}) is not computed right from recurrent states: its logits differ by "
            f"{error:.2g} times the error that rounding explains{REMEDY}"
        )
    return states.make_empty()
