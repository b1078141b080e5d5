"""Loading of models and tokenizers from folders or the hub's cache, with errors that say what to do."""

import logging
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from foredraft.errors import ForedraftError
from foredraft.files import hub
from foredraft.files.gguf import find_gguf
from foredraft.models.folder import (
    CONFIG_FILE,
    StoredTensors,
    build_on_meta,
    check_model_path,
    check_numbers,
    check_shapes,
    read_config,
    read_stored_shapes,
)
from foredraft.models.gguf_model import decode_gguf
from foredraft.models.gguf_tokenizer import read_gguf_tokenizer
from foredraft.models.grid_linear import install_grids
from foredraft.models.loading_errors import MAX_ERROR_CHARS, explain_error, summarise_error
from foredraft.models.model_class import is_multimodal, select_auto_class
from foredraft.models.processor_template import adapt_template
from foredraft.models.quantized import (
    check_decoder_package,
    check_quantization_kind,
    check_stored_dtypes,
    check_unused_tensors,
)
from foredraft.models.text_part import make_text_class
from foredraft.models.versions import warn_if_untested
from foredraft.models.widening import WIDENED_KINDS, DecodedModel, decode_folder, read_generation_config

log = logging.getLogger(__name__)
# Share of a model's tokens that its tokenizer has. Below the minimum, the tokenizer belongs to another model.
MIN_TOKENIZER_COVERAGE = 0.05
# Share below which loading warns. Padding of the vocabulary lowers the share, down to 0.67 for ByT5.
WARN_TOKENIZER_COVERAGE = 0.5
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """Parse the name of a torch dtype.

    Args:
        dtype: "auto", a key of DTYPES, or one of its dtypes.

    Returns:
        The dtype; None for "auto", which loads weights as stored.

    Raises:
        ForedraftError: the dtype is unknown.
    """
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if dtype == "auto":
        return None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ForedraftError(f"unknown dtype {str(dtype)!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def parse_device(device: str | torch.device) -> torch.device:
    """Parse the name of a device.

    Args:
        device: "auto" (the first GPU, or the CPU without one), "cpu", "cuda" or "cuda:N".

    Raises:
        ForedraftError: the device is unknown, not supported or not present.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise ForedraftError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:0") from None
    if parsed.type not in ("cpu", "cuda"):
        raise ForedraftError(f"device {str(parsed)!r} is not supported; use auto, cpu, cuda or cuda:0")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        available = f"only {count} of them" if count else "no GPU"
        raise ForedraftError(f"device {str(parsed)!r} was requested, but torch sees {available}; use device='cpu'")
    return parsed


def load_model(
    name: str,
    dtype: str | torch.dtype,
    device: torch.device,
    tensor_parallel_size: int = 1,
    quantization: str | None = None,
    is_text_only: bool = False,
) -> Any:
    """Load a causal LM or an encoder-decoder model with safetensors weights.

    Remote code and pickles are refused, and so is a checkpoint that lacks a weight.

    Args:
        name: model folder, hub id or GGUF file.
        dtype: dtype of the weights or its name; "auto" = as stored.
        device: device of the model.
        tensor_parallel_size: processes of the default process group of torch, each of which loads its part of the
            weights at the same time. Default 1 = the whole model.
        quantization: "int8" or "int4" if the caller packs the model so, and changes no weight before. Linear layers of
            a checkpoint on that grid are then GridLinear. Default None = none.
        is_text_only: whether to leave out the weights that text does not reach, such as those of an image encoder.
            Such a model cannot be saved. Default False.

    Raises:
        ForedraftError: the model cannot be loaded, or its files contradict each other.
    """
    warn_if_untested()
    torch_dtype = parse_dtype(dtype) or "auto"
    file = find_gguf(name)
    if file is not None:
        model, report = _load_gguf(file, name, torch_dtype, tensor_parallel_size, quantization)
    else:
        model, report = _load_folder(name, torch_dtype, device, tensor_parallel_size, quantization, is_text_only)
    _check_weights(name, model, report)
    _check_end_ids(name, model)
    return model.to(device)


def _load_gguf(
    file: Path, name: str, dtype: str | torch.dtype, processes: int, quantization: str | None
) -> tuple[Any, dict[str, Any]]:
    """Load a GGUF file. Returns the model and the report of transformers."""
    try:
        decoded = decode_gguf(file, dtype, name, processes)
        return _load_decoded(select_auto_class(decoded.config), decoded, name, quantization, "its metadata")
    except ForedraftError:
        raise
    except Exception as error:  # a configuration that transformers refuses
        raise explain_error(name, error) from error


def _load_folder(
    name: str,
    dtype: str | torch.dtype,
    device: torch.device,
    processes: int,
    quantization: str | None,
    is_text_only: bool,
) -> tuple[Any, dict[str, Any]]:
    """Load a folder or hub id. Returns the model and the report of transformers."""
    check_model_path(name)
    path = Path(name).expanduser()
    if path.is_dir():
        stored = _check_folder_contents(path, name)
    else:
        stored = None
        hub.check_reachable(name, CONFIG_FILE)
    kind, quantised_by = _select_model_class(path, stored, name, is_text_only)
    if stored is None and device.type == "cpu" and quantised_by in WIDENED_KINDS:
        path = hub.find_folder(name)
        stored = _check_folder_contents(path, name)
    widened = decode_folder(path, dtype, name, processes, quantization) if device.type == "cpu" else None
    if widened is not None:
        model, report = _load_decoded(kind, widened, name, quantization)
        read_generation_config(model, path)
        return model, report
    check_decoder_package(quantised_by, name)
    options = {"pretrained_model_name_or_path": str(path), "dtype": dtype, **_make_parallel_options(processes)}
    model, report = _load_pretrained(kind, options, name)
    if stored is None:
        _check_folder_contents(_find_snapshot(name), name)
    return model, report


def _load_decoded(
    kind: Any, decoded: DecodedModel, name: str, quantization: str | None, origin: str = CONFIG_FILE
) -> tuple[Any, dict[str, Any]]:
    """Load weights in memory. They need a call without a path, which auto classes refuse."""
    empty = build_on_meta(select_auto_class(decoded.config), decoded.config)
    check_shapes(empty, {key: ("F32", tuple(each.shape)) for key, each in decoded.weights.items()}, name, origin)
    is_own_class = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
    model, report = _load_pretrained(kind if is_own_class else type(empty), decoded.make_options(), name)
    decoded.warn(name, quantization, install_grids(model, decoded.grids, decoded.weights))
    return model, report


def _load_pretrained(kind: Any, options: dict[str, Any], name: str) -> tuple[Any, dict[str, Any]]:
    """Call `from_pretrained` of a class of transformers. Returns the model and the report of what was loaded."""
    try:
        return kind.from_pretrained(  # type: ignore[no-any-return]
            **options,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # lists them in the report; otherwise an exception prints a table
        )
    except Exception as error:  # transformers and the hub raise dozens of kinds
        raise explain_error(name, error) from error


def _make_parallel_options(size: int) -> dict[str, Any]:
    """Make the options of `from_pretrained` that shard the weights over `size` processes; none for one process."""
    if size == 1:
        return {}
    from transformers.distributed import DistributedConfig  # imports torch.distributed, which one process never needs

    return {"distributed_config": DistributedConfig(tp_size=size)}


def build_model_on_meta(name: str) -> Any:
    """Build the model of a folder or hub id on device meta, without its weights.

    Raises:
        ForedraftError: the configuration cannot be read, or describes no model.
    """
    check_model_path(name)
    try:
        config = AutoConfig.from_pretrained(str(Path(name).expanduser()), trust_remote_code=False)
        return build_on_meta(select_auto_class(config), config)
    except Exception as error:  # transformers and the hub raise dozens of kinds
        raise explain_error(name, error) from error


def check_cpu_dtype(model: Any) -> None:
    """Raise ForedraftError for a float16 model on the CPU."""
    if model.dtype is torch.float16 and model.device.type == "cpu":
        raise ForedraftError("float16 is slow and inexact on CPU; use dtype='bfloat16' or 'float32'")


def _select_model_class(
    path: Path, stored: StoredTensors | None, name: str, is_text_only: bool
) -> tuple[Any, str | None]:
    """Select the class that loads a model, and check config.json against the stored shapes.

    Returns:
        The class, and the kind of quantisation or None.
    """
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        kind = select_auto_class(config)
        quantised_by = check_quantization_kind(config.to_dict(), name)
        if stored is not None:
            check_shapes(build_on_meta(kind, config), stored, name)
        if is_text_only and is_multimodal(config):
            kind = make_text_class(build_on_meta(kind, config)) or kind
    except ForedraftError:
        raise
    except (KeyError, TypeError, ArithmeticError, AttributeError, RuntimeError, StrictDataclassError) as error:
        raise ForedraftError(
            f"{name}: its config.json describes no model ({summarise_error(error)}); correct it or fetch it again"
        ) from error
    except Exception as error:  # transformers and the hub raise dozens of kinds
        raise explain_error(name, error) from error
    return kind, quantised_by


def _check_folder_contents(folder: Path, name: str) -> StoredTensors:
    """Check the configuration and the headers of the weight files. No weight is read."""
    config = read_config(folder, name)
    stored = read_stored_shapes(folder, name)
    check_numbers(config, stored, name)
    check_stored_dtypes(folder, stored, check_quantization_kind(config, name), name)
    return stored


def _find_snapshot(name: str) -> Path:
    """Find the cached folder of a hub id that was fetched."""
    return Path(cached_file(name, CONFIG_FILE, local_files_only=True)).parent


def read_vocab_size(model: Any) -> int:
    """Return the number of tokens V of a model's logits."""
    output = model.get_output_embeddings()
    size = model.config.get_text_config().vocab_size if output is None else output.weight.shape[0]
    return int(size)


def _check_end_ids(name: str, model: Any) -> None:
    """Refuse an end-of-sequence id outside the vocabulary, since no sequence could end with it."""
    size = read_vocab_size(model)
    end_ids = {CONFIG_FILE: getattr(model.config.get_text_config(), "eos_token_id", None)}
    if model.generation_config is not None:
        end_ids["generation_config.json"] = model.generation_config.eos_token_id
    for file, entry in end_ids.items():
        for token in entry if isinstance(entry, list | tuple) else [entry]:
            if token is not None and not 0 <= token < size:
                raise ForedraftError(
                    f"{name}: {file} says eos_token_id {token}, and the vocabulary has {size} tokens; correct it, or "
                    "set it to null"
                )


def _check_weights(name: str, model: Any, report: dict[str, Any]) -> None:
    """Refuse missing and mismatched tensors, which transformers initialises at random with only a warning."""
    for key, stored, expected in sorted(report["mismatched_keys"]):
        raise ForedraftError(
            f"{name}: {key} is stored as {list(stored)} and config.json makes it {list(expected)}; "
            "the weights belong to another configuration"
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ForedraftError(
            f"{name}: its weights lack {missing[0]}{_format_remaining(missing)}; the checkpoint is incomplete"
        )
    if report.get("error_msgs"):
        raise ForedraftError(
            f"{name} could not be loaded ({str(report['error_msgs'][0]).splitlines()[0][:MAX_ERROR_CHARS]})"
        )
    check_unused_tensors(report["unexpected_keys"], name)
    parameters = {key for key, _ in model.named_parameters()}
    patterns = {re.sub(r"\d+", "#", key) for key in parameters}
    # An unused tensor of an additional layer, or the bias of a weight: the checkpoint is of another configuration.
    unused = [
        key
        for key in sorted(report["unexpected_keys"])
        if re.sub(r"\d+", "#", key) in patterns or key.removesuffix(".bias") + ".weight" in parameters
    ]
    if unused:
        raise ForedraftError(
            f"{name}: config.json leaves no place for {unused[0]}{_format_remaining(unused)} of its weights; "
            "they belong to another configuration"
        )


def _format_remaining(keys: list[str]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""


def load_tokenizer(name: str, vocab_size: int | None = None) -> Any | None:
    """Load the tokenizer of a model.

    Args:
        name: model folder, hub id or GGUF file.
        vocab_size: number of tokens of the model's logits. Default None = not compared.

    Returns:
        The tokenizer, or None for a folder or file without one.

    Raises:
        ForedraftError: the tokenizer is damaged, or has far fewer tokens than the model.
    """
    path, gguf = Path(name).expanduser(), find_gguf(name)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    has_files = path.is_dir() and any((path / file).exists() for file in files)
    if path.is_dir() and not has_files and gguf is None:
        return None
    try:
        if gguf is not None and not has_files:
            tokenizer = read_gguf_tokenizer(gguf, name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except ForedraftError:
        raise
    except Exception as error:
        if gguf is not None:
            raise ForedraftError(
                f"the tokenizer of {name} could not be read ({summarise_error(error)}); give tokenizer=FOLDER, that "
                "of the model that the file was made from"
            ) from error
        if path.is_dir():
            raise ForedraftError(
                f"the tokenizer of {name} could not be loaded ({summarise_error(error)}); fetch tokenizer.json and "
                "tokenizer_config.json again"
            ) from error
        raise explain_error(f"the tokenizer of {name}", error) from error
    if tokenizer is None:
        return None
    if gguf is None or tokenizer.chat_template is not None:
        adapt_template(tokenizer, name)
    if vocab_size is None:
        return tokenizer
    if len(tokenizer) < MIN_TOKENIZER_COVERAGE * vocab_size:
        raise ForedraftError(
            f"{name}: its tokenizer has {len(tokenizer)} tokens and the model {vocab_size}, so it cannot decode most "
            "of the model's output; fetch the model's own tokenizer, or give tokenizer=None to use token ids"
        )
    if len(tokenizer) < WARN_TOKENIZER_COVERAGE * vocab_size:
        log.warning(
            "%s: its tokenizer has %d tokens and the model %d; is it the model's own?", name, len(tokenizer), vocab_size
        )
    return tokenizer
