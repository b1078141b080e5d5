"""Network of Hydra (2402.05109, section 3): a module for training and a runner for drafting.

The state of a step is everything that its head reads: the target's state and one embedding per token after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.last_hidden_state import HeadLinear, LinearFactory, make_target_head
from foredraft.drafters.common.native_steps import NativeStepRunner, collect_packed
from foredraft.drafters.hydra.checkpoint import PREFIX_LAYER, HydraShape
from foredraft.drafters.hydra.prefix import HydraPrefixLayer, check_prefix_shape, derive_prefix_block
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel
from foredraft.models.native.step_network import NativeStepNetwork, StepKind, StepWeights


def choose_hidden_layer(shape: HydraShape, target: HFModel) -> int:
    """Return the layer boundary of the target whose state the heads read."""
    return target.num_layers - shape.offset if shape.offset else AFTER_FINAL_NORM


def append_embedding(states: Tensor, embedded: Tensor) -> Tensor:
    """Concatenate states [R, n H] and embeddings [R, H] to [R, (n + 1) H], in the wider of their dtypes."""
    return torch.cat([states, embedded.to(torch.promote_types(states.dtype, embedded.dtype))], -1)


def load_prefix_layer(checkpoint: Checkpoint, target: HFModel) -> HydraPrefixLayer:
    """Load the prefix layer of a Hydra++ checkpoint. Raises ForedraftError if its sizes are not the target's."""
    assert isinstance(checkpoint.shape, HydraShape)
    block = derive_prefix_block(checkpoint.shape, target)
    check_prefix_shape(checkpoint.shape, block, checkpoint.folder)
    layer = HydraPrefixLayer(block)
    tensors = {name: value for name, value in checkpoint.tensors.items() if name.startswith(PREFIX_LAYER)}
    layer.load_state_dict({name.removeprefix(PREFIX_LAYER): value for name, value in tensors.items()})
    return layer


class HydraResBlock(nn.Module):
    """Residual block W_r x + b_r + SiLU(W x + b); later make_blocks of a head have x in place of W_r x + b_r."""

    def __init__(self, width: int, hidden: int, is_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden)
        if is_first:
            self.res_connection = nn.Linear(width, hidden)
        self.is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.res_connection(x) if self.is_first else x
        return residual + F.silu(self.linear(x))


class HydraHeads(nn.Module):
    """Network for training. Its tensors have the names that HydraShape documents."""

    def __init__(self, shape: HydraShape, target: HFModel) -> None:
        super().__init__()
        self.shape = shape
        self.target = (target,)  # in a tuple, so that its weights are not registered here
        input_widths = [(head + 2) * shape.hidden for head in range(shape.num_heads)]

        def make_blocks(width: int) -> nn.Sequential:
            later = (HydraResBlock(shape.hidden, shape.hidden, is_first=False) for _ in range(1, shape.num_layers))
            return nn.Sequential(HydraResBlock(shape.rank or width, shape.hidden, is_first=True), *later)

        self.hydra_mlp = nn.ModuleList(map(make_blocks, input_widths))
        if shape.rank is not None:
            rank = shape.rank
            self.hydra_reduce = nn.ModuleList(nn.Linear(width, rank, bias=False) for width in input_widths)
        if shape.has_own_head:
            self.hydra_lm_head = nn.ModuleList(nn.Linear(shape.hidden, shape.vocab_size) for _ in input_widths)
        if shape.prefix is not None:
            self.prefix_embeding_layer = HydraPrefixLayer(derive_prefix_block(shape, target))

    def encode_features(self, features: Tensor) -> Tensor:
        """Compute the states [B, L, H] that drafts start from, from target states [B, L, H] of whole sequences."""
        x = self.begin(features)
        return x if self.shape.prefix is None else self.prefix_embeding_layer.encode_sequences(x)

    def begin(self, hidden: Tensor) -> Tensor:
        """Convert target states to the dtype of the heads."""
        return hidden.to(next(self.parameters()).dtype)

    def forward(self, step: int, states: Tensor, tokens: Tensor) -> Tensor:
        """Append the embeddings of tokens [R] to states [R, (step + 1) H]: the input of head `step`."""
        return append_embedding(states, F.embedding(tokens, self.target[0].embedding).to(states.dtype))

    def compute_logits(self, step: int, states: Tensor) -> Tensor:
        """Compute logits [R, V] of head `step` from its input [R, (step + 2) H]."""
        x = states if self.shape.rank is None else self.hydra_reduce[step](states)
        x = self.hydra_mlp[step](x)
        if self.shape.has_own_head:
            return self.hydra_lm_head[step](x)  # type: ignore[no-any-return]
        return self.target[0].compute_logits(x.to(self.target[0].model.dtype))


@dataclass(frozen=True)
class HydraHeadWeights:
    """Weights of one head."""

    reduce: HeadLinear | None  # projection to the rank; None = no rank
    first_layer: HeadLinear  # both matrices of the first block: rows of W, then rows of W_r
    later_layers: tuple[HeadLinear, ...]
    output: HeadLinear


class HydraStepRunner:
    """Heads for drafting, with packed matrix products.

    Args:
        shape: sizes of the heads.
        tensors: weights, by the names that HydraShape documents.
        depth: number of heads to run.
        linears: factory of the matrix products.
        target: lends the embedding, and the output matrix if the heads have none.
        vocab_size: V of the target; further rows are left out.
    """

    def __init__(
        self,
        shape: HydraShape,
        tensors: dict[str, Tensor],
        depth: int,
        linears: LinearFactory,
        target: HFModel,
        vocab_size: int,
    ) -> None:
        self.hidden = shape.hidden
        self._embedding = target.embedding[:vocab_size].to(linears.device, linears.dtype)
        shared_output = None if shape.has_own_head else make_target_head(target, linears)

        def make_output(name: str) -> HeadLinear:
            weight, bias = (tensors[f"{name}.{kind}"][:vocab_size] for kind in ("weight", "bias"))
            return linears.make(weight, bias, is_head=True)

        def make_head(head: int) -> HydraHeadWeights:
            first = [f"hydra_mlp.{head}.0.{kind}" for kind in ("linear", "res_connection")]
            later = [f"hydra_mlp.{head}.{layer}.linear" for layer in range(1, shape.num_layers)]
            weight, bias = (torch.cat([tensors[f"{name}.{kind}"] for name in first]) for kind in ("weight", "bias"))
            return HydraHeadWeights(
                reduce=None if shape.rank is None else linears.make(tensors[f"hydra_reduce.{head}.weight"]),
                first_layer=linears.make(weight, bias),
                later_layers=tuple(linears.make(tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in later),
                output=make_output(f"hydra_lm_head.{head}") if shared_output is None else shared_output,
            )

        self._head_weights = [make_head(head) for head in range(depth)]

    def make_native(self) -> NativeStepRunner | None:
        """Make the native form; None if a product is no native kernel."""
        steps = []
        for head in self._head_weights:
            packed = collect_packed([head.output, head.first_layer, *head.later_layers])
            reduce = [] if head.reduce is None else collect_packed([head.reduce])
            if packed is None or reduce is None:
                return None
            output, *blocks = packed
            embedding = self._embedding.contiguous()
            steps.append(StepWeights(output, reduce[0] if reduce else None, tuple(blocks), embedding=embedding))
        network = NativeStepNetwork.from_steps(StepKind.HEADS, steps, self.hidden) if steps else None
        return None if network is None else NativeStepRunner(network)

    def begin(self, hidden: Tensor) -> Tensor:
        """Return the states unchanged: head 0 reads them."""
        return hidden

    def __call__(self, step: int, states: Tensor, tokens: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Run head `step` on states [R, (step + 1) H] and R tokens.

        Returns:
            Its input [R, (step + 2) H], which is the next state, and logits [R, W].
        """
        head = self._head_weights[step]
        states = append_embedding(
            states, F.embedding(torch.as_tensor(tokens, device=self._embedding.device), self._embedding)
        )
        x = head.first_layer(states if head.reduce is None else head.reduce(states))
        x = x[:, self.hidden :] + F.silu(x[:, : self.hidden])
        for product in head.later_layers:
            x = x + F.silu(product(x))
        return states, head.output(x)
