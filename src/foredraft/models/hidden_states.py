"""Hidden states at the layer boundaries of a transformers model, collected with hooks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM


@contextmanager
def capture_hidden_states(model: Any, hidden_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the hidden states at layer boundaries with hooks, by boundary, while the context is open."""
    captured: dict[int, Tensor] = {}
    layers = find_decoder_layers(model) if hidden_layers else nn.ModuleList()
    handles = []
    for boundary in hidden_layers:

        def capture_input(
            _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], boundary: int = boundary
        ) -> None:
            captured[boundary] = args[0] if args else kwargs["hidden_states"]

        def capture_output(_: nn.Module, __: Any, output: Any, boundary: int = boundary) -> None:
            captured[boundary] = output if isinstance(output, Tensor) else output[0]

        if boundary == AFTER_FINAL_NORM:
            handles.append(model.get_decoder().register_forward_hook(capture_output))
        elif boundary == 0:
            handles.append(layers[0].register_forward_pre_hook(capture_input, with_kwargs=True))
        else:
            handles.append(layers[boundary - 1].register_forward_hook(capture_output))
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def find_decoder_layers(model: Any) -> nn.ModuleList:
    """Find the stack of decoder layers: the first module list with as many modules as the model has layers."""
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ForedraftError(f"{type(model).__name__}: no stack of {depth} decoder layers was found for hidden states")
