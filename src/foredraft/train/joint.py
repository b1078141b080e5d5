"""The target learning together with its heads (Medusa-2, 2401.10774): a live copy of it, held close to what it was.

The heads warm up first, on a target that does not move. Then both learn: the heads on the live states, the target at a
small rate on its own loss, the divergence from its old law, so that what it says changes little.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foredraft import LLM
from foredraft.checkpoints.disk import replace_files, writing
from foredraft.drafters.training import Losses, Trace, Trainee, draft_loss, mean
from foredraft.models.fused import why_not
from foredraft.models.lm import HFModel, decoder_layers
from foredraft.models.load import load_model
from foredraft.models.window import NORMED
from foredraft.train.publish import FULL

FOLDER = "target"  # beside the heads
WARMUP = 0.2  # share of the steps, where the trainee does not say


@dataclass(frozen=True)
class Live:
    """The target as a module that takes gradients."""

    model: Any
    taps: tuple[int, ...]

    @classmethod
    def of(cls, target: HFModel, taps: Sequence[int]) -> "Live":
        """Its weights once more, in float32: those that serve are packed."""
        model = load_model(target.name, torch.float32, target.device)
        model.set_attn_implementation("sdpa")
        return cls(model.train(), tuple(taps))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, L, V] and states [B, L, F] at the taps."""
        found: dict[int, Tensor] = {}
        handles = [self._hook(tap, found) for tap in self.taps]
        try:
            logits = self.model(input_ids=tokens, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        return logits, torch.cat([found[tap] for tap in self.taps], -1)

    def _hook(self, tap: int, found: dict[int, Tensor]) -> Any:
        """Boundaries are counted as in HFModel.forward."""
        if tap == 0:
            return decoder_layers(self.model)[0].register_forward_pre_hook(_before(found), with_kwargs=True)
        module = self.model.get_decoder() if tap == NORMED else decoder_layers(self.model)[tap - 1]
        return module.register_forward_hook(_after(found, tap))


def _before(found: dict[int, Tensor]) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        found[0] = args[0] if args else kwargs["hidden_states"]

    return hook


def _after(found: dict[int, Tensor], tap: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found[tap] = output if isinstance(output, Tensor) else output[0]

    return hook


@dataclass(frozen=True)
class Joint:
    """The loss of heads and target together."""

    trainee: Trainee
    live: Live
    loss: str  # of the target: a divergence from its old law, or ce
    warmup: int  # steps in which only the heads learn

    def __call__(self, trace: Trace, step: int) -> Losses:
        if step < self.warmup:
            return self.trainee.loss(trace)
        logits, states = self.live.forward(trace.tokens[:, :-1])
        heads = self.trainee.loss(Trace(trace.tokens, states, trace.law, trace.mask))
        own = mean(draft_loss(self.loss, logits, trace.law, trace.tokens[:, 1:]), trace.mask[:, 1:])
        return Losses(heads.total + own, {**heads.parts, "target": float(own.detach())})

    def save(self, folder: Path, dtype: torch.dtype, tokenizer: Any) -> None:
        """The tuned target, as a model folder."""
        model = copy.deepcopy(self.live.model).to(dtype)

        def write(place: Path) -> None:
            model.save_pretrained(place)
            if tokenizer is not None:
                tokenizer.save_pretrained(place)

        with writing(folder / FOLDER, FULL):
            replace_files(folder / FOLDER, write)

    def llm(self, dtype: torch.dtype, tokenizer: Any) -> LLM:
        """To draft for the target as it is now."""
        model = copy.deepcopy(self.live.model).to(dtype).eval()
        is_native = model.device.type == "cpu" and why_not(model) is None
        return LLM(model, None, tokenizer=tokenizer, fused=True if is_native else None)
