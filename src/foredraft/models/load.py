"""Loading of models and tokenizers from folders or the hub's cache, with errors a person can act on."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from foredraft.errors import ForedraftError

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """A torch dtype by name; None for "auto", which means as stored."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        raise ForedraftError(f"unknown dtype {dtype!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def parse_device(device: str | torch.device) -> torch.device:
    """A usable device; "auto" is the first GPU if there is one."""
    if isinstance(device, torch.device):
        return device
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ForedraftError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:0") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ForedraftError(f"device {device!r} was asked for, but torch sees no GPU; use device='cpu'")
    return chosen


def _reason(name: str, error: Exception) -> ForedraftError:
    text = f"{type(error).__name__}: {error}".lower()
    if "gated" in text or "401" in text or "403" in text:
        return ForedraftError(f"{name} is gated or private: ask for access on its page, then log in with `hf auth login`")
    if "unrecognized model" in text or "model type" in text or "model_type" in text:
        return ForedraftError(f"{name}: its config.json names no architecture that this transformers version knows")
    if "config.json" in text and Path(name).is_dir():
        return ForedraftError(f"{name} is a folder without a readable config.json; it is not a model folder")
    if "couldn't connect" in text or "offline" in text or "not the path to a directory" in text or "locate" in text:
        return ForedraftError(f"{name} is not in the local cache and could not be fetched; check the name or the network")
    if "not a local folder" in text or "404" in text or "repository not found" in text:
        return ForedraftError(f"{name} is neither a local folder nor a model on the hub; check the spelling")
    return ForedraftError(f"{name} could not be loaded ({type(error).__name__}: {str(error).splitlines()[0][:200]})")


def _check_place(name: str) -> None:
    path = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not path.exists():
        raise ForedraftError(f"{name} does not exist; give a model folder or a hub id such as org/name")
    if path.is_file():
        raise ForedraftError(f"{name} is a file; give the folder that holds config.json and the weights")
    if path.is_dir() and not (path / "config.json").exists():
        raise ForedraftError(f"{name} is a folder without a config.json; it is not a model folder")


def load_model(name: str, dtype: str | torch.dtype, device: torch.device) -> Any:
    """A causal LM with safetensors weights; no remote code, no pickles. Raises ForedraftError."""
    _check_place(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if config.is_encoder_decoder:
            raise ForedraftError(f"{name} is an encoder-decoder model; only causal LMs are supported")
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=parse_dtype(dtype) or "auto", trust_remote_code=False, use_safetensors=True
        )
    except ForedraftError:
        raise
    except Exception as error:  # transformers and the hub raise dozens of kinds
        raise _reason(name, error) from error
    return model.to(device)


def load_tokenizer(name: str) -> Any | None:
    """The tokenizer beside a model, or None for a folder without one."""
    path = Path(name).expanduser()
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if path.is_dir() and not any((path / file).exists() for file in files):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise _reason(f"the tokenizer of {name}", error) from error


def check_vocabularies(
    target: tuple[str, Any | None, int], draft: tuple[str, Any | None, int]
) -> None:
    """Refuse a draft whose tokens are not the target's. Each side is (name, tokenizer or None, width of its logits).

    Vocabularies padded to different widths with the same tokens are accepted. Raises ForedraftError with both names
    and the first token, by id, that differs.
    """
    (target_name, target_tok, target_size), (draft_name, draft_tok, draft_size) = target, draft
    if target_tok is None or draft_tok is None:
        if target_size != draft_size:
            raise ForedraftError(
                f"{draft_name} has {draft_size} tokens and {target_name} {target_size}, and without both tokenizers "
                "they cannot be compared; use a draft made for this target"
            )
        return
    ours = {i: token for token, i in target_tok.get_vocab().items() if i < target_size}
    theirs = {i: token for token, i in draft_tok.get_vocab().items() if i < draft_size}
    for i in sorted(ours.keys() | theirs.keys()):
        if ours.get(i) != theirs.get(i):
            raise ForedraftError(
                f"{draft_name} does not share the vocabulary of {target_name}: token {i} is {theirs.get(i)!r} in the "
                f"draft and {ours.get(i)!r} in the target; use a draft with the target's tokenizer"
            )
