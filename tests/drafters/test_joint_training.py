"""Settings of methods that can train the target with their heads."""

import sys

import pytest

from foredraft.drafters.joint_training import JointSettings, JointTraining, LoraAdapters
from foredraft.errors import ForedraftError
from tests.support.fake_peft import allow_lora

WRONG = [
    ({"heads_weight": 0.5}, "heads_weight has no effect on a frozen target; give backbone too"),
    ({"backbone_warmup": 0.5}, "backbone_warmup has no effect on a frozen target"),
    ({"backbone_loss": "ce"}, "backbone_loss has no effect on a frozen target"),
    ({"lora_rank": 4}, "lora_rank has no effect on a frozen target"),
    ({"backbone": 0.1, "lora_alpha": 4.0}, "lora_alpha has no effect without LoRA; give lora_rank too"),
    ({"backbone": 0.1, "lora_modules": ("q_proj",)}, "lora_modules has no effect without LoRA"),
    ({"backbone": 0.0}, "backbone must be positive, got 0.0"),
    ({"backbone": float("nan")}, "backbone must be positive, got nan"),
    ({"backbone": 0.1, "heads_weight": -1.0}, "heads_weight must be positive"),
    ({"backbone": 0.1, "heads_weight": float("inf")}, "heads_weight must be positive"),
    ({"backbone": 0.1, "lora_rank": 0}, "lora_rank must be positive, got 0"),
    ({"backbone": 0.1, "lora_rank": 4, "lora_alpha": 0.0}, "lora_alpha must be positive"),
    ({"backbone": 0.1, "backbone_warmup": 1.0}, "at least 0 and below 1, got 1.0"),
    ({"backbone": 0.1, "backbone_warmup": -0.1}, "at least 0 and below 1"),
    ({"backbone": 0.1, "backbone_loss": "mse"}, "unknown loss 'mse'; use one of ce, kl"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_a_setting_out_of_range_or_without_effect_is_refused(settings, message):
    with pytest.raises(ForedraftError, match=message):
        JointSettings(**settings)


def test_lora_without_its_library_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ForedraftError, match=r"lora_rank needs the library peft: pip install .*\[lora\]") as error:
        JointSettings(backbone=0.1, lora_rank=4)
    assert "\n" not in str(error.value)
    assert JointSettings(backbone=0.1).make_joint_training("kl")  # full training needs no library


def test_settings_make_the_declaration(monkeypatch):
    allow_lora(monkeypatch)
    assert JointSettings().make_joint_training("kl") is None
    assert JointSettings(backbone=0.5).make_joint_training("tv") == JointTraining(0.5, "tv", 1.0, 0.2, None)
    chosen = JointSettings(0.5, "ce", 0.0, 0.2, 8, None, ("q_proj",)).make_joint_training("kl")
    assert chosen == JointTraining(0.5, "ce", 0.2, 0.0, LoraAdapters(8, 16.0, ("q_proj",)))
    assert JointSettings(backbone=0.5, lora_rank=8, lora_alpha=3.0).make_joint_training("kl").lora.alpha == 3
