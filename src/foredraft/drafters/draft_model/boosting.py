"""Boost-tuning of several draft models: each next one learns the positions that the earlier ones miss.

Several draft models draft together as one tree (`draft_model+draft_model`). A second model that errs where the first
errs adds nothing. So a position at which an earlier model predicts the target's likeliest token has less weight in its
loss. SpecInfer leaves out whole texts that an earlier model continues as the target does. Here every position counts
for itself, because few long texts are continued without an error, and each position is the root of a tree.

Reference: SpecInfer, 2305.09781, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.draft_model.compatibility import check_same_kind, check_same_vocabulary
from foredraft.drafters.draft_model.teacher_forcing import compute_trace_logits
from foredraft.drafters.losses import Trace
from foredraft.models.hf import HFModel
from foredraft.models.loading import load_model


@dataclass(frozen=True)
class EarlierDrafts:
    """Frozen draft models that are trained already."""

    models: tuple[Any, ...]  # transformers models with the target's vocabulary

    @classmethod
    def load(cls, folders: Sequence[str], target: HFModel) -> "EarlierDrafts":
        """Load the models in the target's dtype, on its device.

        Raises:
            ForedraftError: if a folder holds no model of the target's architecture and vocabulary.
        """
        models = []
        for folder in folders:
            model = load_model(folder, target.model.dtype, target.device)
            check_same_kind(model.config, folder, target)
            check_same_vocabulary(model, folder, target)
            models.append(model.eval().requires_grad_(False))
        return cls(tuple(models))

    @torch.no_grad()
    def find_covered(self, trace: Trace) -> Tensor:
        """Return [B, L] bool: positions at which a model predicts the target's likeliest token."""
        expected = trace.target_log_probs.find_argmax()
        covered = torch.zeros_like(expected, dtype=torch.bool)
        for model in self.models:
            covered |= compute_trace_logits(model, trace).argmax(-1) == expected
        return covered
