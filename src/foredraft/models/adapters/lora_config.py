"""adapter_config.json of PEFT: which modules a LoRA adapter changes, with which rank and scale."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.models.lora import CONFIG_FILE

ALL_LINEAR = "all-linear"
MERGE = "merge it into its model with PEFT (merge_and_unload, then save_pretrained) and serve that folder"
# Fields that do not change what an adapter computes, or that are read here.
HARMLESS = frozenset(
    {
        "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_core", "megatron_config", "loftq_config",
        "eva_config", "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying", "r", "lora_alpha",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
        "use_rslora", "init_lora_weights",
    }
)  # fmt: skip
# Fields that change more than low-rank products, with their names in errors.
REFUSED = {
    "use_dora": "DoRA (use_dora)",
    "modules_to_save": "whole modules (modules_to_save)",
    "lora_bias": "biases of its own (lora_bias)",
    "trainable_token_indices": "embeddings of single tokens (trainable_token_indices)",
    "target_parameters": "parameters outside linear layers (target_parameters), such as those of experts",
    "layer_replication": "repeated layers (layer_replication)",
    "alora_invocation_tokens": "an invocation sequence (alora_invocation_tokens)",
    "use_qalora": "QALoRA (use_qalora)",
}
CHANGING_STARTS = ("pissa", "olora", "corda", "lora_ga")  # init_lora_weights that change the weights of the model


@dataclass(frozen=True)
class LoraConfig:
    """Ranks, scales and modules of an adapter."""

    rank: int
    alpha: float
    targets: str | tuple[str, ...]  # regular expression, "all-linear", or ends of paths
    excluded: str | tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    uses_rslora: bool = False  # scale = alpha / sqrt(rank), otherwise alpha / rank
    layers: tuple[int, ...] | None = None  # None = all
    layer_lists: tuple[str, ...] = ()  # names of the lists of layers; () = any

    @classmethod
    def parse(cls, content: Mapping[str, Any], folder: str) -> "LoraConfig":
        """Parse the file.

        Args:
            content: content of the file.
            folder: folder as the user wrote it, for messages.

        Raises:
            ForedraftError: a field is wrong, or the adapter changes more than linear layers.
        """
        _check_fields(content, folder)
        targets = content.get("target_modules")
        if not targets:
            raise ForedraftError(f"{folder}: {CONFIG_FILE} has no target_modules; fetch it again")
        layers = content.get("layers_to_transform")
        try:
            return cls(
                rank=_read_rank(content["r"]),
                alpha=float(content["lora_alpha"]),
                targets=_read_names(targets),
                excluded=_read_names(content.get("exclude_modules") or ()),
                rank_pattern={key: _read_rank(value) for key, value in (content.get("rank_pattern") or {}).items()},
                alpha_pattern={key: float(value) for key, value in (content.get("alpha_pattern") or {}).items()},
                uses_rslora=bool(content.get("use_rslora")),
                layers=None if layers in (None, []) else tuple([layers] if isinstance(layers, int) else layers),
                layer_lists=_read_list(content.get("layers_pattern") or ()),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ForedraftError(
                f"{folder}: {CONFIG_FILE} has a wrong or missing field ({error}); fetch it again"
            ) from None

    def choose(self, linears: Iterable[str], head: str | None) -> list[str]:
        """Choose the modules that the adapter changes.

        Args:
            linears: paths of the linear modules of a model.
            head: path of the output matrix, which "all-linear" leaves out; None = it has none.
        """
        return [path for path in linears if self._is_target(path, head)]

    def find_rank(self, path: str) -> int:
        """Return the rank of the matrices of a module."""
        return self.rank_pattern.get(_find_pattern(self.rank_pattern, path) or "", self.rank)

    def find_scale(self, path: str) -> float:
        """Return the factor of the product of the matrices of a module."""
        alpha = self.alpha_pattern.get(_find_pattern(self.alpha_pattern, path) or "", self.alpha)
        rank = self.find_rank(path)
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)

    def _is_target(self, path: str, head: str | None) -> bool:
        if _matches(self.excluded, path):
            return False
        if self.targets == ALL_LINEAR:
            return path != head
        return _matches(self.targets, path) and self._has_layer(path)

    def _has_layer(self, path: str) -> bool:
        """Return whether the layer of a module is one of `layers`, which holds for a list of names alone."""
        if self.layers is None or isinstance(self.targets, str) or path in self.targets:
            return True
        patterns = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in self.layer_lists] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for pattern in patterns if (match := re.match(pattern, path))), None)
        return found is not None and int(found[1]) in self.layers


def _check_fields(content: Mapping[str, Any], folder: str) -> None:
    """Raise ForedraftError for fields with an effect that requests cannot have of their own."""
    for name, value in content.items():
        if name in HARMLESS or value in (None, False, [], {}, "none"):
            continue
        what = REFUSED.get(name, f"the option {name}")
        if name == "bias":
            what = f"biases of the model (bias={value!r})"
        raise ForedraftError(f"{folder}: the adapter has {what}, which a request cannot have of its own; {MERGE}")
    start = content.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGING_STARTS):
        raise ForedraftError(
            f"{folder}: init_lora_weights={start!r} changes the weights of the model too; convert the adapter with "
            "PEFT (save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _read_rank(value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"a rank is {value!r}")
    return value


def _read_names(value: Any) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else _read_list(value)


def _read_list(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a list of modules has an entry that is no name")
    return names


def _matches(wanted: str | Sequence[str], path: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in wanted)


def _find_pattern(patterns: Mapping[str, Any], path: str) -> str | None:
    """Find the first pattern that matches the end of a path."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", path)), None)
