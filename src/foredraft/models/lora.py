"""LoRA adapters in PEFT's format, merged into a loaded model by the library peft."""

import warnings
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError, format_install_command
from foredraft.files.file_checks import check_regular_file, read_json

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_ERROR_CHARS = 200  # characters of peft's error that our message repeats


def merge_lora(model: Any, folder: str | Path, name: str) -> Any:
    """Merge an adapter into the weights of a model, and return the model.

    Args:
        model: transformers model, which is changed.
        folder: folder of the adapter.
        name: name of the model in errors.

    Raises:
        ForedraftError: peft is missing, the folder holds no LoRA adapter, the adapter is of another model, or the model
            has an encoder.
    """
    path = check_lora_folder(folder)
    if model.config.is_encoder_decoder:
        raise ForedraftError(f"{name} has an encoder, so lora cannot adapt it; merge the adapter into it first")
    try:
        from peft import PeftModel
    except ImportError:
        raise ForedraftError(f"a LoRA adapter needs the library peft: {format_install_command('lora')}") from None
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        try:
            # peft's safe_merge rounds the product of the matrices before it is added, so its sums differ.
            merged = PeftModel.from_pretrained(model, str(path)).merge_and_unload()
        except (ValueError, RuntimeError, KeyError, TypeError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)[:MAX_ERROR_CHARS]
            raise ForedraftError(
                f"the adapter {folder} does not fit {name} ({first}); give that of this model"
            ) from error
    if any("missing adapter keys" in str(message.message) for message in messages):
        raise ForedraftError(f"the adapter {folder} lacks weights that its {CONFIG_FILE} names; fetch it again")
    vars(merged).pop("peft_config", None)
    if not all(bool(parameter.isfinite().all()) for parameter in merged.parameters()):
        raise ForedraftError(f"the adapter {folder} makes weights of {name} infinite or NaN; fetch it again")
    return merged


def check_lora_folder(folder: str | Path) -> Path:
    """Return the path of an adapter folder after a check of its files.

    Raises:
        ForedraftError: there is no such folder, or it holds no LoRA adapter with safetensors weights.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ForedraftError(f"{folder} is no folder; give the folder of a LoRA adapter, with {CONFIG_FILE}")
    if not (path / CONFIG_FILE).exists():
        raise ForedraftError(f"{folder} has no {CONFIG_FILE}, so it is no adapter; a whole model is given as a model")
    kind = read_json(path / CONFIG_FILE, str(folder), "an adapter").get("peft_type")
    if kind != "LORA":
        raise ForedraftError(f"{folder} is an adapter of the kind {kind!r}; only LORA is served, so merge it first")
    if not (path / WEIGHTS_FILE).exists():
        raise ForedraftError(f"{folder} has no {WEIGHTS_FILE}; save the adapter as safetensors (save_pretrained does)")
    check_regular_file(path / WEIGHTS_FILE, str(folder))
    return path
