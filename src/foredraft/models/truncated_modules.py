"""Copies of a transformers model with a shorter layer stack, around the same modules."""

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from foredraft.errors import ForedraftError
from foredraft.models.draft_layer import RMSNorm
from foredraft.models.hidden_states import find_decoder_layers

# Standard deviation of the outputs of a new adapter's input projections, for inputs with variance 1. Hidden states are
# large after some layers, so an adapter with a small gain learns slowly.
ADAPTER_GAIN = 2.0


class Adapter(nn.Module):
    """Gated residual MLP in place of the skipped layers: x + down(silu(gate(norm x)) * up(norm x)).

    A new adapter is the identity.

    Args:
        hidden: width of the hidden states.
        rank: width inside the MLP.
        eps: epsilon of the norm.
    """

    def __init__(self, hidden: int, rank: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, eps)
        self.gate_proj = nn.Linear(hidden, rank, bias=False)
        self.up_proj = nn.Linear(hidden, rank, bias=False)
        self.down_proj = nn.Linear(rank, hidden, bias=False)
        for inner in (self.gate_proj, self.up_proj):
            nn.init.normal_(inner.weight, std=ADAPTER_GAIN * hidden**-0.5)
        nn.init.zeros_(self.down_proj.weight)

    @property
    def sizes(self) -> tuple[int, int, float]:
        """Arguments that make an adapter of the same sizes."""
        return self.gate_proj.in_features, self.gate_proj.out_features, self.norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """Adapt hidden states [.., H]."""
        normed = self.norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))  # type: ignore[no-any-return]


def truncate_model(model: Any, count: int, adapter: Adapter | None = None) -> Any:
    """Copy a model around the same modules with a shorter layer stack. The model itself is not changed.

    Args:
        model: transformers model.
        count: number of layers of the copy.
        adapter: runs after the last of these layers. Default None = no adapter.

    Raises:
        ForedraftError: hooks replaced the forward of a module, so a copy would call the whole model.
    """
    layers = find_decoder_layers(model)
    first_layers = list(layers[:count])
    if adapter is not None:
        first_layers[-1] = _attach_adapter(first_layers[-1], adapter)
    *owners, name = next(path for path, module in model.named_modules() if module is layers).split(".")
    view = parent = _copy_module(model)
    for owner in owners:
        child = _copy_module(getattr(parent, owner))
        setattr(parent, owner, child)
        parent = child
    setattr(parent, name, nn.ModuleList(first_layers))
    return view


def find_final_norm(model: Any) -> nn.Module | None:
    """Find the norm between the last layer and the head; None if it is ambiguous.

    It is the only norm beside the layer stack, or the only one after it.
    """
    layers = find_decoder_layers(model)
    path = next(path for path, module in model.named_modules() if module is layers)
    children: list[nn.Module] = list(model.get_submodule(path.rpartition(".")[0]).children())
    norms: list[nn.Module] = [child for child in children if getattr(getattr(child, "weight", None), "ndim", 0) == 1]
    later = [child for child in norms if children.index(child) > children.index(layers)]
    for candidates in (norms, later):
        if len(candidates) == 1:
            return candidates[0]
    return None


def _copy_module(module: Any) -> Any:
    """Copy a module with the same parameters and children."""
    if "forward" in vars(module):
        raise ForedraftError(
            f"the forward of {type(module).__name__} was replaced (device_map does so), so a part of it cannot run "
            "alone; load the model on one device"
        )
    view: Any = object.__new__(type(module))  # copy.copy calls the class, which FSDP2 replaces by one with arguments
    view.__dict__ = dict(vars(module))
    view._modules = dict(module._modules)
    return view


def _attach_adapter(layer: Any, adapter: Adapter) -> Any:
    """Copy a layer with the adapter after it."""
    view = _copy_module(layer)
    view._forward_hooks = OrderedDict(layer._forward_hooks)

    def apply_adapter(module: nn.Module, args: Any, output: Any) -> Any:
        return adapter(output) if isinstance(output, Tensor) else (adapter(output[0]), *output[1:])

    _: RemovableHandle = view.register_forward_hook(apply_adapter)
    return view
