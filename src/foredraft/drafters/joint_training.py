"""Training of the target together with its heads (Medusa-2, 2401.10774): the declaration, and settings for it.

A method that can train the target derives its settings from `JointSettings`, and its trainee declares the
`JointTraining` that they make. `foredraft.train` does the rest for any such method.
"""

import importlib.util
import math
from dataclasses import dataclass, fields

from foredraft.drafters.losses import check_loss
from foredraft.errors import ForedraftError, format_install_command


def make_missing_peft_error() -> ForedraftError:
    """Return the error for LoRA without the library peft."""
    return ForedraftError(f"lora_rank needs the library peft: {format_install_command('lora')}")


@dataclass(frozen=True)
class LoraAdapters:
    """Low-rank matrices that learn in place of the target's own: W + alpha / rank * B A.

    Attributes:
        rank: rows of A.
        alpha: scale of the product.
        modules: names of the adapted linear layers, such as "q_proj"; None = all linear layers of the decoder layers.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...] | None = None


@dataclass(frozen=True)
class JointTraining:
    """Training of the target together with its heads. The loss is the target's + heads_weight * the heads'.

    Attributes:
        rate: learning rate of the target as a share of the heads'.
        loss: loss of the target: a divergence from its original distribution, or "ce" with the text. Default "kl".
        heads_weight: weight of the heads' loss. Default 1.
        warmup: share of the run in which only the heads learn, in [0, 1). Default 0.2.
        lora: adapters that learn in place of the target's weights. Default None = all its weights learn.
    """

    rate: float
    loss: str = "kl"
    heads_weight: float = 1.0
    warmup: float = 0.2
    lora: LoraAdapters | None = None


@dataclass(frozen=True)
class JointSettings:
    """Training settings of a method that can train the target too.

    Args:
        backbone: learning rate of the target as a share of the heads' (Medusa-2); None = frozen target (Medusa-1).
        backbone_loss: loss of the target: a divergence from its original distribution, or ce; None = `loss`.
        backbone_warmup: share of the run in which only the heads learn, in [0, 1).
        heads_weight: weight of the heads' loss beside the target's, above 0.
        lora_rank: rank of LoRA matrices that learn in place of the target's weights; None = all its weights learn.
        lora_alpha: scale of LoRA; None = twice the rank.
        lora_modules: names of the linear layers with LoRA, such as q_proj,v_proj; None = all of the decoder layers.

    Raises:
        ForedraftError: if a value is out of range or has no effect, or if LoRA's library is missing.
    """

    backbone: float | None = None
    backbone_loss: str | None = None
    backbone_warmup: float = 0.2
    heads_weight: float = 1.0
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_modules: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        changed = [field.name for field in fields(JointSettings) if getattr(self, field.name) != field.default]
        if self.backbone is None and changed:
            raise ForedraftError(
                f"{changed[0]} has no effect on a frozen target; give backbone too, such as backbone=0.1"
            )
        lora = [name for name in changed if name in ("lora_alpha", "lora_modules")]
        if self.lora_rank is None and lora:
            raise ForedraftError(f"{lora[0]} has no effect without LoRA; give lora_rank too, such as lora_rank=16")
        for name, value in (
            ("backbone", self.backbone), ("heads_weight", self.heads_weight), ("lora_rank", self.lora_rank),
            ("lora_alpha", self.lora_alpha),
        ):  # fmt: skip
            if value is not None and not 0 < value < math.inf:
                raise ForedraftError(f"{name} must be positive, got {value}")
        if not 0 <= self.backbone_warmup < 1:
            raise ForedraftError(f"backbone_warmup must be at least 0 and below 1, got {self.backbone_warmup}")
        if self.backbone_loss is not None:
            check_loss(self.backbone_loss)
        if self.lora_rank is not None and importlib.util.find_spec("peft") is None:
            raise make_missing_peft_error()

    def make_joint_training(self, loss: str) -> JointTraining | None:
        """Return the training of the target, None if it is frozen.

        Args:
            loss: loss of the heads, which is the target's too unless `backbone_loss` is set.
        """
        if self.backbone is None:
            return None
        lora = None
        if self.lora_rank is not None:
            lora = LoraAdapters(self.lora_rank, self.lora_alpha or 2.0 * self.lora_rank, self.lora_modules)
        return JointTraining(self.backbone, self.backbone_loss or loss, self.heads_weight, self.backbone_warmup, lora)
