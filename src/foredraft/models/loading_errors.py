"""Errors of transformers and the hub, converted to one line that says what to do."""

import re
from pathlib import Path

from foredraft.errors import ForedraftError
from foredraft.files import hub

MAX_ERROR_CHARS = 200  # characters of another library's error that our message repeats


def explain_error(name: str, error: Exception) -> ForedraftError:
    """Convert an error of transformers or the hub to one that says what to do."""
    text = f"{type(error).__name__}: {error}".lower()
    is_local = Path(name).expanduser().is_dir()
    if "gated" in text or "401 client" in text or "403 client" in text:
        return ForedraftError(
            f"{name} is gated or private: ask for access on its page, then log in with `hf auth login`"
        )
    if "unrecognized configuration class" in text:
        return ForedraftError(
            f"{name} is not a causal language model ({_find_config_class(str(error))}); "
            "give a model for text generation"
        )
    if "unrecognized model" in text or "model type" in text or "model_type" in text:
        return ForedraftError(f"{name}: its config.json names no architecture that this transformers version supports")
    if "not a valid json" in text or "jsondecodeerror" in text:
        return ForedraftError(f"{name}: its config.json is not valid JSON; fetch it again")
    if "safetensorerror" in text:
        return ForedraftError(f"{name}: its safetensors weights are damaged or cut off; fetch them again")
    if not is_local and (
        "couldn't connect" in text or "offline" in text or "locate" in text or "localentrynotfound" in text
    ):
        return hub.make_fetch_error(name)
    if not is_local and ("not a local folder" in text or "404 client" in text or "repository not found" in text):
        return ForedraftError(f"{name} is neither a local folder nor a model on the hub; check the spelling")
    return ForedraftError(f"{name} could not be loaded ({summarise_error(error)})")


def summarise_error(error: Exception) -> str:
    """Summarise an error by its type and first two lines: transformers names a field, then its fault."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:MAX_ERROR_CHARS]}"


def _find_config_class(text: str) -> str:
    match = re.search(r"'[\w.]*?(\w+Config)'", text)
    return match[1] if match else "by its configuration"
