"""The layers whose states vLLM exports, and the command that starts vLLM so.

vLLM numbers layers as Foredraft numbers boundaries: k is the residual stream after k layers, 0 the embeddings. It has
no number for the state after the final norm, which is computed from the last boundary. Its files hold the layers in
ascending order and do not name them, so the folder's name does: layers-2-16-32.
"""

import json
import os
import re
import shlex
from collections.abc import Sequence

from foredraft.models.forward_batch import AFTER_FINAL_NORM

DEFAULT_FOLDER = "/dev/shm/states"  # in memory, for the commands in errors
FOLDER_NAME = re.compile(r"layers((?:-\d+)+)")


def list_exports(hidden_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """List the boundaries that vLLM must export, in ascending order.

    Args:
        hidden_layers: boundaries that a method reads.
        num_layers: layers of the target; the last boundary gives the distribution.
    """
    return tuple(sorted({*hidden_layers, num_layers} - {AFTER_FINAL_NORM}))


def name_folder(exports: Sequence[int]) -> str:
    """Name the folder of the files with these boundaries."""
    return "-".join(["layers", *map(str, exports)])


def parse_folder(name: str) -> tuple[int, ...] | None:
    """Return the boundaries that the name of a folder has, in ascending order; None for other names."""
    found = FOLDER_NAME.fullmatch(name)
    return None if found is None else tuple(sorted({int(number) for number in found[1].split("-")[1:]}))


def make_vllm_command(model: str, exports: Sequence[int], folder: str = DEFAULT_FOLDER) -> str:
    """Return the shell command of a vLLM that exports states.

    Args:
        model: folder or hub id of the target.
        exports: boundaries to export, in ascending order.
        folder: folder for the files. Default: one in memory.
    """
    layers = {"eagle_aux_hidden_state_layer_ids": list(exports)}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": os.path.join(folder, name_folder(exports))},
    }
    options = ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]
    return shlex.join(["vllm", "serve", model, *options])
