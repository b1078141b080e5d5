"""Checks of a model folder before transformers opens it: files, configuration, and tensor shapes.

transformers allocates the model of a configuration before it reads the weights, so one damaged number may exhaust the
memory. These functions compare the configuration with the headers of the weight files first.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from foredraft.errors import ForedraftError
from foredraft.files import hub
from foredraft.files.file_checks import check_regular_file, read_json
from foredraft.files.header import read_header

StoredTensors = Mapping[str, tuple[str, tuple[int, ...]]]  # (dtype, shape) by stored name; dtype as in safetensors
SINGLE_FILE, INDEX_FILE, CONFIG_FILE = "model.safetensors", "model.safetensors.index.json", "config.json"
OPENED_SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja")  # endings of files that transformers may open
FOLDER_TITLE = "a model folder"  # name of the kind of folder in errors
JSON_FILES = (
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.json",
)  # fmt: skip
MAX_CONTEXT = 2**31 - 1  # tokens; positions are 32-bit integers in many kernels
MAX_WEIGHTS_PER_BYTE = 8  # weights in one stored byte if each has one bit
MAX_BYTES_PER_VALUE = 8  # bytes of one stored value, at most (float64)
MAX_CONFIG_DEPTH = 3  # nested objects of config.json whose numbers are checked
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # stored dtypes whose shape is the shape of the parameter
# Keys of config.json by the check that applies to their values.
DEPTH_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
POSITIVE_KEYS = (*DEPTH_KEYS, "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "hidden_size")
LAYER_KEYS = (*DEPTH_KEYS, "encoder_layers", "decoder_layers", "num_decoder_layers")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


def check_model_path(name: str) -> None:
    """Check that a name is a model folder or may be a hub id.

    Args:
        name: path or hub id.

    Raises:
        ForedraftError: the path does not exist or is no model folder; the message says what to do.
    """
    path = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not path.exists():
        raise ForedraftError(f"{name} does not exist; give a model folder or a hub id such as org/name")
    if not path.exists():
        return
    if not path.is_dir():
        raise ForedraftError(hub.explain_file(name, path))
    if not (path / CONFIG_FILE).is_symlink() and not (path / CONFIG_FILE).exists():
        raise ForedraftError(f"{name} is a folder without a {CONFIG_FILE}; {hub.explain_folder(path, FOLDER_TITLE)}")
    if not any(path.glob("*.safetensors")):
        pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in path.glob(kind))
        raise ForedraftError(
            f"{name} holds its weights only as a pickle ({pickles[0]}), which can run code when opened; "
            "save them as safetensors (model.save_pretrained does)"
            if pickles
            else f"{name} holds no safetensors weights (model.safetensors); {hub.explain_folder(path, FOLDER_TITLE)}"
        )


def read_config(path: Path, name: str) -> dict[str, Any]:
    """Read config.json after a check of every file that transformers may open.

    Args:
        path: model folder.
        name: name of the model in errors.

    Raises:
        ForedraftError: a file is no regular file or no valid JSON.
    """
    for file in sorted(path.iterdir()):
        if file.suffix in OPENED_SUFFIXES:
            check_regular_file(file, name)
            if file.name in JSON_FILES:
                read_json(file, name, FOLDER_TITLE)
    return read_json(path / CONFIG_FILE, name, FOLDER_TITLE)


def read_stored_shapes(path: Path, name: str) -> StoredTensors:
    """Read dtype and shape of every tensor of a model folder from the headers of its files.

    Args:
        path: model folder.
        name: name of the model in errors.

    Raises:
        ForedraftError: a file is missing or damaged, or there are no tensors.
    """
    files = list_weight_files(path, name)
    shapes = {}
    for file in files:
        for key, entry in read_header(path / file, name).items():
            shapes[key] = (entry.dtype, entry.shape)
    if not shapes:
        raise ForedraftError(f"{name}: {files[0]} holds no tensors; fetch it again")
    return shapes


def list_weight_files(path: Path, name: str) -> list[str]:
    """List the weight files of a model folder: the single file, or those of the index.

    Args:
        path: model folder.
        name: name of the model in errors.

    Raises:
        ForedraftError: the index is missing or damaged, or lists a file that is missing.
    """
    if (path / SINGLE_FILE).exists() or (path / SINGLE_FILE).is_symlink():
        return [SINGLE_FILE]
    if not (path / INDEX_FILE).exists():
        first = min(file.name for file in path.glob("*.safetensors"))
        raise ForedraftError(
            f"{name} holds {first} and neither {SINGLE_FILE} nor {INDEX_FILE}; fetch the whole folder again"
        )
    mapping = read_json(path / INDEX_FILE, name, FOLDER_TITLE).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(file, str) for file in mapping.values()):
        raise ForedraftError(f"{name}: its {INDEX_FILE} has no weight_map; fetch it again")
    files = sorted(set(mapping.values()))
    for file in files:
        if Path(file).name != file:
            raise ForedraftError(f"{name}: its {INDEX_FILE} points outside the folder ({file!r}); fetch it again")
        if not (path / file).exists():
            raise ForedraftError(f"{name}: {file} is missing, and its {INDEX_FILE} lists it; fetch it too")
    return files


def check_numbers(config: dict[str, Any], stored: StoredTensors, name: str) -> None:
    """Check that the numbers of config.json are possible for a model with these tensors.

    A layer has at least one tensor. An expert has at least one tensor, or one row of the router's matrix.

    Args:
        config: contents of config.json.
        stored: tensors of the folder.
        name: name of the model in errors.

    Raises:
        ForedraftError: a number is impossible.
    """
    rows = max((max(shape, default=0) for _, shape in stored.values()), default=0)
    for key, value in _iterate_numbers(config):
        finding = f"{name}: config.json says {key} {value!r}"
        plain = key.removeprefix("text_config.")
        if plain in POSITIVE_KEYS and value < 1:
            raise ForedraftError(f"{finding}, and a model has at least one; fetch config.json again")
        plain = key.rpartition(".")[2]
        if plain in LAYER_KEYS and value > len(stored):
            raise ForedraftError(f"{finding}, and its weights are {len(stored)} tensors; fetch config.json again")
        if plain in EXPERT_KEYS and value > max(rows, len(stored)):
            raise ForedraftError(f"{finding}, and its weights are too few for that; fetch config.json again")
        if plain in CONTEXT_KEYS and not 0 <= value <= MAX_CONTEXT:
            raise ForedraftError(f"{finding}, and a sequence has at most {MAX_CONTEXT} tokens; correct it")
        if plain == "rope_theta" and not (0 < value < math.inf):
            raise ForedraftError(f"{finding}, and it has to be positive; correct it (10000.0 is usual)")


def _iterate_numbers(config: dict[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int | float]]:
    """Yield every number of a configuration with its dotted key."""
    for key, value in config.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict) and depth < MAX_CONFIG_DEPTH:
            yield from _iterate_numbers(value, f"{prefix}{key}.", depth + 1)


def check_shapes(model: Any, stored: StoredTensors, name: str, origin: str = CONFIG_FILE) -> None:
    """Compare a model on device meta with the stored tensors.

    Shapes are compared for float tensors under the same name. All others are covered by a bound on the total size.

    Args:
        model: model without memory.
        stored: tensors of the folder.
        name: name of the model in errors.
        origin: where the configuration is from. Default config.json.

    Raises:
        ForedraftError: a shape differs, or the model has far more numbers than the folder.
    """
    total, stored_bytes = 0, sum(math.prod(shape) * MAX_BYTES_PER_VALUE for _, shape in stored.values())
    for key, parameter in sorted(model.named_parameters()):
        total += parameter.numel()
        entry = stored.get(key)
        if entry is None or entry[0] not in FLOAT_DTYPES or entry[1] == tuple(parameter.shape):
            continue
        raise ForedraftError(
            f"{name}: {key} is stored as {list(entry[1])} and {origin} makes it {list(parameter.shape)}; "
            "the weights belong to another configuration"
        )
    if total > MAX_WEIGHTS_PER_BYTE * stored_bytes:
        raise ForedraftError(
            f"{name}: {origin} makes a model of {total:,} numbers, and its weights hold far fewer; "
            "the weights belong to another configuration"
        )


def build_on_meta(kind: Any, config: Any) -> Any:
    """Build the model of a configuration on device meta, without memory.

    Args:
        kind: auto class or model class of transformers.
        config: transformers configuration.
    """
    is_model_class = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
    with torch.device("meta"):
        return kind(config) if is_model_class else kind.from_config(config)
