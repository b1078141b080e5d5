"""A model's folder, looked through before transformers opens it: files, configuration, the shapes that are announced.

transformers builds whatever a configuration asks for and looks at the weights afterwards, so that a damaged number
costs all the memory there is. Here the numbers are held against the headers of the weights first.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from foredraft.checkpoints import hub
from foredraft.checkpoints.header import read_header
from foredraft.checkpoints.regular import check_regular, read_json
from foredraft.errors import ForedraftError

Stored = Mapping[str, tuple[str, tuple[int, ...]]]  # (dtype, shape) by stored name
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
OPENED = (".json", ".safetensors", ".model", ".txt", ".jinja")  # endings of files that transformers may open
MODEL = "a model folder"
PARSED = (
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.json",
)  # fmt: skip
MAX_CONTEXT = 2**31 - 1  # positions are 32-bit numbers in many kernels
PER_BYTE = 8  # weights that one stored byte can stand for, at one bit each
DEPTH = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
POSITIVE = (*DEPTH, "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "hidden_size")
LAYERS = (*DEPTH, "encoder_layers", "decoder_layers", "num_decoder_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts")
CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


def check_place(name: str) -> None:
    """Raises ForedraftError for a name that is no folder of a model, with what to do about what is there instead."""
    path = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not path.exists():
        raise ForedraftError(f"{name} does not exist; give a model folder or a hub id such as org/name")
    if path.is_file():
        raise ForedraftError(hub.file_instead(name, path))
    if not path.is_dir():
        return
    if not (path / CONFIG).is_symlink() and not (path / CONFIG).exists():
        raise ForedraftError(f"{name} is a folder without a {CONFIG}; {hub.unreadable(path, MODEL)}")
    if not any(path.glob("*.safetensors")):
        pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in path.glob(kind))
        raise ForedraftError(
            f"{name} holds its weights only as a pickle ({pickled[0]}), which can run code when opened; "
            "save them as safetensors (model.save_pretrained does)"
            if pickled
            else f"{name} holds no safetensors weights (model.safetensors); {hub.unreadable(path, MODEL)}"
        )


def read_config(path: Path, name: str) -> dict[str, Any]:
    """config.json, with every file that will be opened looked at first. Raises ForedraftError."""
    for file in sorted(path.iterdir()):
        if file.suffix in OPENED:
            check_regular(file, name)
            if file.name in PARSED:
                read_json(file, name, MODEL)
    return read_json(path / CONFIG, name, MODEL)


def stored_shapes(path: Path, name: str) -> Stored:
    """(dtype, shape) of every tensor of a model's folder by its stored name. Raises ForedraftError."""
    files = [SINGLE] if (path / SINGLE).exists() or (path / SINGLE).is_symlink() else _shards(path, name)
    found = {}
    for file in files:
        for key, entry in read_header(path / file, name).items():
            found[key] = (entry.dtype, entry.shape)
    if not found:
        raise ForedraftError(f"{name}: {files[0]} holds no tensors; fetch it again")
    return found


def _shards(path: Path, name: str) -> list[str]:
    if not (path / INDEX).exists():
        first = min(file.name for file in path.glob("*.safetensors"))
        raise ForedraftError(f"{name} holds {first} and neither {SINGLE} nor {INDEX}; fetch the whole folder again")
    mapping = read_json(path / INDEX, name, MODEL).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(file, str) for file in mapping.values()):
        raise ForedraftError(f"{name}: its {INDEX} has no weight_map; fetch it again")
    files = sorted(set(mapping.values()))
    for file in files:
        if Path(file).name != file:
            raise ForedraftError(f"{name}: its {INDEX} points outside the folder ({file!r}); fetch it again")
        if not (path / file).exists():
            raise ForedraftError(f"{name}: {file} is missing, which its {INDEX} names; fetch it too")
    return files


def check_numbers(config: dict[str, Any], stored: Stored, name: str) -> None:
    """Raises ForedraftError for numbers of config.json that no model with these tensors has.

    A layer has a tensor of its own at least; an expert has one, or a row of the router's matrix.
    """
    rows = max((max(shape, default=0) for _, shape in stored.values()), default=0)
    for key, value in _numbers(config):
        place = f"{name}: config.json says {key} {value!r}"
        plain = key.removeprefix("text_config.")
        if plain in POSITIVE and value < 1:
            raise ForedraftError(f"{place}, and a model has at least one; fetch config.json again")
        plain = key.rpartition(".")[2]
        if plain in LAYERS and value > len(stored):
            raise ForedraftError(f"{place}, and its weights are {len(stored)} tensors; fetch config.json again")
        if plain in EXPERTS and value > max(rows, len(stored)):
            raise ForedraftError(f"{place}, and its weights have no place for so many; fetch config.json again")
        if plain in CONTEXT and not 0 <= value <= MAX_CONTEXT:
            raise ForedraftError(f"{place}, and a text has at most {MAX_CONTEXT} tokens; correct it")
        if plain == "rope_theta" and not (0 < value < math.inf):
            raise ForedraftError(f"{place}, and it has to be positive; correct it (10000.0 is usual)")


def _numbers(config: dict[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int | float]]:
    """Every number of a configuration, with the path to it."""
    for key, value in config.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict) and depth < 3:
            yield from _numbers(value, f"{prefix}{key}.", depth + 1)


def check_shapes(model: Any, stored: Stored, name: str) -> None:
    """Hold a model without memory (device meta) against what is stored. Raises ForedraftError.

    Only tensors that are stored as they are used can be compared by shape; for all of them together there is a bound.
    """
    total, held = 0, sum(math.prod(shape) * 8 for _, shape in stored.values())
    for key, parameter in sorted(model.named_parameters()):
        total += parameter.numel()
        found = stored.get(key)
        if found is None or found[0] not in ("F64", "F32", "F16", "BF16") or found[1] == tuple(parameter.shape):
            continue
        raise ForedraftError(
            f"{name}: {key} is stored as {list(found[1])} and config.json makes it {list(parameter.shape)}; "
            "the weights belong to another configuration"
        )
    if total > PER_BYTE * held:
        raise ForedraftError(
            f"{name}: config.json makes a model of {total:,} numbers, and its weights hold far fewer; "
            "the weights belong to another configuration"
        )


def outline(kind: Any, config: Any) -> Any:
    """The model of a configuration without memory."""
    with torch.device("meta"):
        return kind.from_config(config)
