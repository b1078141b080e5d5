"""Damaged folders of targets and drafters, by name. Each entry changes a good folder; some damage is none."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], None]
WEIGHTS = "model.safetensors"
DEEP = "[" * 100_000
NUMBERS: dict[str, list[Any]] = {
    "num_hidden_layers": [0, -1, 10**7, 1.5, "two", 3],
    "vocab_size": [0, -5, 10**9, "many"],
    "hidden_size": [0, 7, 10**9],
    "intermediate_size": [0, 10**9, 65],
    "num_attention_heads": [0, 3, 10**9],
    "num_key_value_heads": [0, 3, 10**9],
    "head_dim": [0, 10**9, "x"],
    "max_position_embeddings": [2**40, -1, "long"],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 0}, {"rope_type": "default", "rope_theta": -1.0},
        {"rope_type": "default", "rope_theta": "x"}, {"rope_type": "spiral", "rope_theta": 1e4}, "none",
    ],
    "eos_token_id": [10**9, -7, "x", [3, 10**9]],
    "hidden_act": ["abc", 5],
    "rms_norm_eps": ["x", [1]],
    "model_type": [5, None, "perceptron9000", "vit"],
    "dtype": ["float3", 7],
    "quantization_config": ["fp8", {"quant_method": "modelopt"}, {"quant_method": 3}, [1]],
    "is_encoder_decoder": [True],
}  # fmt: skip
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")


def list_target_damage() -> dict[str, Damage]:
    """List damages of a folder of a Llama with one safetensors file, generation_config.json and a tokenizer."""
    found: dict[str, Damage] = {
        f"{name} {value!r}"[:60]: _change_config(name, value) for name, values in NUMBERS.items() for value in values
    }
    for file in (*JSON_FILES, "tokenizer.json"):
        found |= {f"{file} {what}": _overwrite(file, data) for what, data in _TEXTS.items()}
    for file in (*JSON_FILES, WEIGHTS):
        found |= _list_irregular_files(file)
    return found | _list_header_damage(WEIGHTS) | _list_tensor_damage() | _list_index_damage()


def list_drafter_damage(file: str) -> dict[str, Damage]:
    """List damages of a drafter whose weights are in `file`, safetensors or a pickle."""
    found: dict[str, Damage] = {f"config.json {what}": _overwrite("config.json", data) for what, data in _TEXTS.items()}
    found |= _list_irregular_files("config.json") | _list_irregular_files(file)
    return found | (_list_header_damage(file) if file.endswith(".safetensors") else _list_pickle_damage(file))


_TEXTS = {
    "empty": b"", "cut off": b'{"a": [1, 2', "no text": bytes(range(256)), "a list": b"[1]", "a number": b"3",
    "nested": DEEP.encode(), "nested objects": b'{"a":' * 100_000,
}  # fmt: skip


def _change_config(name: str, value: Any) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))

    return damage


def _overwrite(name: str, data: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return damage


def _list_irregular_files(name: str) -> dict[str, Damage]:
    def replace_file(make: Callable[[Path], None]) -> Damage:
        def damage(folder: Path) -> None:
            (folder / name).unlink()
            make(folder / name)

        return damage

    return {
        f"{name} a folder": replace_file(Path.mkdir),
        f"{name} a pipe": replace_file(os.mkfifo),
        f"{name} a broken link": replace_file(lambda file: file.symlink_to("nowhere")),
        f"{name} a device": replace_file(lambda file: file.symlink_to("/dev/zero")),
    }


def _list_header_damage(name: str) -> dict[str, Damage]:
    def header(change: Callable[[dict[str, Any]], Any]) -> Damage:
        def damage(folder: Path) -> None:
            data = (folder / name).read_bytes()
            size = struct.unpack("<Q", data[:8])[0]
            text = json.dumps(change(json.loads(data[8 : 8 + size]))).encode()
            (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

        return damage

    def one(key: str, value: Any) -> Damage:
        def change(held: dict[str, Any]) -> dict[str, Any]:
            first = next(name for name in held if name != "__metadata__")
            return held | {first: held[first] | {key: value}}

        return header(change)

    def cut(size: int) -> Damage:
        return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])

    return {
        **{f"weights cut to {size}": cut(size) for size in (0, 3, 8, 100, 3000, -1)},
        "header nested": _overwrite(name, struct.pack("<Q", len(DEEP)) + DEEP.encode()),
        "header nested objects": _overwrite(name, struct.pack("<Q", 500_000) + b'{"a":' * 100_000),
        "header longer than the file": _overwrite(name, struct.pack("<Q", 2**62) + b"{}"),
        "header a list": header(lambda held: list(held)),
        "no tensors": header(lambda held: {}),
        "offsets overlap": one("data_offsets", [0, 8]),
        "offsets backwards": one("data_offsets", [64, 0]),
        "offsets negative": one("data_offsets", [-8, 0]),
        "offsets missing": one("data_offsets", []),
        "shape negative": one("shape", [-1, 4]),
        "shape huge": one("shape", [2**40, 2**40]),
        "shape a word": one("shape", "wide"),
        "dtype unknown": one("dtype", "F12"),
        "dtype another": one("dtype", "I64"),
        "a pointer of git-lfs": _overwrite(name, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    }


def _list_tensor_damage() -> dict[str, Damage]:
    def edit(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
        def damage(folder: Path) -> None:
            held = change(load_file(folder / WEIGHTS))
            save_file(held, folder / WEIGHTS, {"format": "pt"})

        return damage

    attention = "model.layers.0.self_attn.q_proj"
    weight, rounded = f"{attention}.weight", torch.float8_e4m3fn
    return {
        "a tensor missing": edit(lambda held: {k: v for k, v in held.items() if "down_proj" not in k}),
        "a tensor narrower": edit(lambda held: held | {"lm_head.weight": held["lm_head.weight"][:, :8].clone()}),
        "a weight in float8": edit(lambda held: held | {weight: held[weight].to(rounded)}),
        "a scale": edit(lambda held: held | {f"{attention}.weight_scale": torch.ones(1)}),
        "a scale of the input": edit(lambda held: held | {f"{attention}.input_scale": torch.ones(1)}),
        "a packed weight": edit(lambda held: held | {f"{attention}.weight_packed": torch.ones(4, dtype=torch.int32)}),
        "a layer too many": edit(lambda held: held | {"model.layers.2.mlp.up_proj.weight": torch.ones(64, 32)}),
    }  # fmt: skip


def _list_index_damage() -> dict[str, Damage]:
    def index(data: Any) -> Damage:
        def damage(folder: Path) -> None:
            (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
            (folder / f"{WEIGHTS}.index.json").write_text(data if isinstance(data, str) else json.dumps(data))

        return damage

    return {
        "index outside": index({"weight_map": {"lm_head.weight": "../model.safetensors"}}),
        "index of a missing shard": index({"weight_map": {"lm_head.weight": "model-00009-of-00009.safetensors"}}),
        "index without a map": index({"metadata": {}}),
        "index of numbers": index({"weight_map": {"lm_head.weight": 3}}),
        "index of nothing": index({"weight_map": {}}),
        "index nested": index(DEEP),
        "no index": lambda folder: (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors") and None,
    }


def _list_pickle_damage(name: str) -> dict[str, Damage]:
    def cut(size: int) -> Damage:
        return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])

    class Bomb:
        def __reduce__(self) -> Any:
            return (os.mkdir, ("exploded",))

    return {
        **{f"weights cut to {size}": cut(size) for size in (0, 3, 100, 3000, -1)},
        "a pickle that runs code": lambda folder: torch.save({"a": Bomb()}, folder / name),
        "a pickle of nested lists": lambda folder: torch.save({"a": _make_nested_list()}, folder / name),
        "a pickle of numbers": lambda folder: torch.save({"a": 3}, folder / name),
        "a pickle of a list": lambda folder: torch.save([1], folder / name),
        "no pickle": _overwrite(name, b"PK\x03\x04" + bytes(100)),
    }


def _make_nested_list() -> list[Any]:
    held: list[Any] = []
    for _ in range(200):
        held = [held]
    return held
