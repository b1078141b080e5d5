"""Loading of models and tokenizers from folders or the hub's cache, with errors a person can act on."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
)

from foredraft.errors import ForedraftError
from foredraft.models.versions import warn_if_untested

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """A torch dtype by name; None for "auto", which means as stored."""
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if dtype == "auto":
        return None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ForedraftError(f"unknown dtype {str(dtype)!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def parse_device(device: str | torch.device) -> torch.device:
    """A usable device; "auto" is the first GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ForedraftError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:0") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ForedraftError(f"device {str(chosen)!r} is not supported; use auto, cpu, cuda or cuda:0")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        seen = f"only {count} of them" if count else "no GPU"
        raise ForedraftError(f"device {str(chosen)!r} was asked for, but torch sees {seen}; use device='cpu'")
    return chosen


def _reason(name: str, error: Exception) -> ForedraftError:
    text = f"{type(error).__name__}: {error}".lower()
    is_local = Path(name).expanduser().is_dir()
    if "gated" in text or "401 client" in text or "403 client" in text:
        return ForedraftError(
            f"{name} is gated or private: ask for access on its page, then log in with `hf auth login`"
        )
    if "unrecognized configuration class" in text:
        return ForedraftError(f"{name} is not a causal language model ({_config_class(str(error))})")
    if "unrecognized model" in text or "model type" in text or "model_type" in text:
        return ForedraftError(f"{name}: its config.json names no architecture that this transformers version knows")
    if "not a valid json" in text or "jsondecodeerror" in text:
        return ForedraftError(f"{name}: its config.json is not valid JSON; fetch it again")
    if "safetensorerror" in text:
        return ForedraftError(f"{name}: its safetensors weights are damaged or cut off; fetch them again")
    if not is_local and (
        "couldn't connect" in text or "offline" in text or "locate" in text or "localentrynotfound" in text
    ):
        return ForedraftError(
            f"{name} is not in the local cache and could not be fetched; check the name or the network"
        )
    if not is_local and ("not a local folder" in text or "404 client" in text or "repository not found" in text):
        return ForedraftError(f"{name} is neither a local folder nor a model on the hub; check the spelling")
    first = str(error).strip().partition("\n")[0]
    return ForedraftError(f"{name} could not be loaded ({type(error).__name__}: {first[:200]})")


def _config_class(text: str) -> str:
    found = re.search(r"'[\w.]*?(\w+Config)'", text)
    return found[1] if found else "by its configuration"


def _check_place(name: str) -> None:
    path = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not path.exists():
        raise ForedraftError(f"{name} does not exist; give a model folder or a hub id such as org/name")
    if path.is_file():
        raise ForedraftError(f"{name} is a file; give the folder that holds config.json and the weights")
    if not path.is_dir():
        return
    if not (path / "config.json").exists():
        raise ForedraftError(f"{name} is a folder without a config.json; it is not a model folder")
    if not any(path.glob("*.safetensors")):
        pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in path.glob(kind))
        raise ForedraftError(
            f"{name} holds its weights only as a pickle ({pickled[0]}), which can run code when opened; "
            "save them as safetensors (model.save_pretrained does)"
            if pickled
            else f"{name} holds no safetensors weights (model.safetensors)"
        )


def load_model(name: str, dtype: str | torch.dtype, device: torch.device) -> Any:
    """A causal LM or an encoder-decoder model with safetensors weights; no remote code, no pickles, no weight made up.

    Raises ForedraftError.
    """
    _check_place(name)
    warn_if_untested()
    place = str(Path(name).expanduser())
    wanted = parse_dtype(dtype) or "auto"
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        model, report = _class_for(config).from_pretrained(
            place,
            dtype=wanted,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the report names them, instead of a table in an exception
        )
    except ForedraftError:
        raise
    except Exception as error:  # transformers and the hub raise dozens of kinds
        raise _reason(name, error) from error
    _check_weights(name, model, report)
    return model.to(device)


def _class_for(config: Any) -> Any:
    if not config.is_encoder_decoder:
        return AutoModelForCausalLM
    is_speech = type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
    return AutoModelForSpeechSeq2Seq if is_speech else AutoModelForSeq2SeqLM


def _check_weights(name: str, model: Any, report: dict[str, Any]) -> None:
    """Refuse what transformers only warns of: a tensor missing or of another shape is drawn at random."""
    for key, stored, expected in sorted(report["mismatched_keys"]):
        raise ForedraftError(
            f"{name}: {key} is stored as {list(stored)} and config.json makes it {list(expected)}; "
            "the weights belong to another configuration"
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ForedraftError(f"{name}: its weights lack {missing[0]}{_and_more(missing)}; the checkpoint is incomplete")
    if report.get("error_msgs"):
        raise ForedraftError(f"{name} could not be loaded ({str(report['error_msgs'][0]).splitlines()[0][:200]})")
    held = {key for key, _ in model.named_parameters()}
    alike = {re.sub(r"\d+", "#", key) for key in held}
    # a layer beyond the last, or the bias of a weight that has none: the model computes something else without it
    lost = [
        key
        for key in sorted(report["unexpected_keys"])
        if re.sub(r"\d+", "#", key) in alike or key.removesuffix(".bias") + ".weight" in held
    ]
    if lost:
        raise ForedraftError(
            f"{name}: config.json leaves no place for {lost[0]}{_and_more(lost)} of its weights; "
            "they belong to another configuration"
        )


def _and_more(keys: list[str]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""


def load_tokenizer(name: str) -> Any | None:
    """The tokenizer beside a model, or None for a folder without one."""
    path = Path(name).expanduser()
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if path.is_dir() and not any((path / file).exists() for file in files):
        return None
    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:
        raise _reason(f"the tokenizer of {name}", error) from error


def check_vocabularies(target: tuple[str, Any | None, int], draft: tuple[str, Any | None, int]) -> None:
    """Refuse a draft whose tokens are not the target's. Each side is (name, tokenizer or None, width of its logits).

    Raises ForedraftError with both names and the first token, by id, that differs.
    """
    found = difference(target, draft)
    if found is not None:
        raise ForedraftError(f"{found}; use a draft with the target's tokenizer")


def difference(target: tuple[str, Any | None, int], draft: tuple[str, Any | None, int]) -> str | None:
    """Where two vocabularies differ, in words, or None. Each side is (name, tokenizer or None, width of its logits).

    Vocabularies padded to different widths with the same tokens are one. Without both tokenizers only the widths can be
    compared.
    """
    (target_name, target_tok, target_size), (draft_name, draft_tok, draft_size) = target, draft
    if target_tok is None or draft_tok is None:
        if target_size == draft_size:
            return None
        return (
            f"{draft_name} has {draft_size} tokens and {target_name} {target_size}, and without both tokenizers "
            "they cannot be compared"
        )
    ours = {i: token for token, i in target_tok.get_vocab().items() if i < target_size}
    theirs = {i: token for token, i in draft_tok.get_vocab().items() if i < draft_size}
    for i in sorted(ours.keys() | theirs.keys()):
        if ours.get(i) != theirs.get(i):
            return (
                f"{draft_name} does not share the vocabulary of {target_name}: token {i} is {_spelled(theirs, i)} in "
                f"the draft and {_spelled(ours, i)} in the target"
            )
    return None


def _spelled(vocabulary: dict[int, str], i: int) -> str:
    return repr(vocabulary[i]) if i in vocabulary else "missing"
