"""Copy of the target that takes gradients, in all its weights or in LoRA adapters."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.drafters.joint_training import LoraAdapters
from foredraft.drafters.losses import Trace, average_over_mask, compute_draft_loss
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel
from foredraft.models.hidden_states import capture_hidden_states
from foredraft.models.loading import load_model
from foredraft.train.lora import add_adapters, merge_adapters


@dataclass(frozen=True)
class TrainableTarget:
    """Copy of the target as a module with gradients."""

    model: Any
    hidden_layers: tuple[int, ...]
    has_adapters: bool = False

    @classmethod
    def from_model(
        cls, target: HFModel, hidden_layers: Sequence[int], lora: LoraAdapters | None = None, is_mixed: bool = False
    ) -> "TrainableTarget":
        """Load the weights again: those that serve requests are packed, and give the original distribution.

        Args:
            target: target to copy.
            hidden_layers: layer boundaries whose states `forward` returns.
            lora: adapters that learn; None = all weights learn, in float32.
            is_mixed: whether matrix products run in bfloat16. Frozen weights are then kept in it.

        Raises:
            ForedraftError: if the weights cannot be trained.
        """
        dtype = torch.bfloat16 if is_mixed and lora is not None else torch.float32
        model = load_model(target.name, dtype, target.device)
        if getattr(model.config, "quantization_config", None) is not None:
            raise ForedraftError(
                f"the weights of {target.name} are quantized and cannot be trained; give the model before "
                "quantization, or leave backbone out"
            )
        model.set_attn_implementation("sdpa")
        if lora is not None:
            add_adapters(model, lora, target.name)
        return cls(model.train(), tuple(hidden_layers), lora is not None)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, L, V] and hidden states [B, L, F] at the hidden layers."""
        with capture_hidden_states(self.model, self.hidden_layers) as states:
            logits = self.model(input_ids=tokens, use_cache=False).logits
        return logits, torch.cat([states[layer] for layer in self.hidden_layers], -1)

    @torch.no_grad()
    def measure(self, traces: Iterable[Trace]) -> dict[str, float]:
        """Measure the current weights on traces of the original target.

        Returns:
            `target_kl`, the divergence from the original distribution, and `target_ce`, the loss on the text, in nats
            per token to learn; {} without traces.
        """
        sums, num_learnt = {"target_kl": 0.0, "target_ce": 0.0}, 0.0
        for trace in traces:
            logits, count = self.forward(trace.tokens[:, :-1])[0], float(trace.mask[:, 1:].sum())
            for key in sums:
                sums[key] += count * float(average_loss(key.removeprefix("target_"), logits, trace))
            num_learnt += count
        return {key: round(total / num_learnt, 5) for key, total in sums.items()} if num_learnt else {}

    @torch.no_grad()
    def build_model(self, dtype: torch.dtype) -> Any:
        """Build a model of the target's own class with the current weights, adapters merged.

        Every weight is converted on its own, so the memory is one copy in `dtype`. Frozen weights that have this dtype
        are shared. Buffers, such as frequencies of rotary positions, keep theirs.

        Args:
            dtype: dtype of the weights.
        """
        memo: dict[int, Any] = {}  # of copy.deepcopy: object in the copy by id of the original
        for parameter in self.model.parameters():
            weight = parameter.detach().to(dtype, copy=parameter.requires_grad)
            memo[id(parameter)] = nn.Parameter(weight, requires_grad=False)
        for wrapped, (original, matrix) in merge_adapters(self.model).items() if self.has_adapters else ():
            memo[id(original.weight)] = nn.Parameter(matrix.to(dtype), requires_grad=False)
            memo[id(wrapped)] = copy.deepcopy(original, memo)
        model = copy.deepcopy(self.model, memo)
        vars(model).pop("peft_config", None)
        model.config.dtype = dtype
        return model.eval()


def average_loss(name: str, logits: Tensor, trace: Trace) -> Tensor:
    """Average the loss `name` of the target's logits [B, L, V] over the tokens to learn."""
    loss = compute_draft_loss(name, logits, trace.target_log_probs, trace.tokens[:, 1:])
    return average_over_mask(loss, trace.mask[:, 1:])
