"""Numbers of layers, the folder that names them, and the command."""

import json
import shlex

from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.train.remote.vllm_export import list_exports, make_vllm_command, name_folder, parse_folder


def test_the_last_boundary_stands_for_the_state_after_the_norm_and_gives_the_distribution():
    assert list_exports((16, AFTER_FINAL_NORM, 2), 32) == (2, 16, 32)
    assert list_exports((), 32) == (32,)


def test_a_folder_names_its_layers():
    assert name_folder((2, 16, 32)) == "layers-2-16-32"
    assert parse_folder("layers-2-16-32") == (2, 16, 32)
    assert parse_folder("layers-32-2") == (2, 32), "vLLM writes them in ascending order"
    assert [parse_folder(name) for name in ("layers", "layers-", "layers-x", "states", "layers-1-")] == [None] * 5


def test_the_command_is_one_that_a_shell_splits_into_vllms_options():
    program, verb, model, *options = shlex.split(make_vllm_command("my model", (0, 2), "/a b"))
    assert (program, verb, model) == ("vllm", "serve", "my model")
    values = {name: json.loads(value) for name, value in zip(options[::2], options[1::2], strict=True)}
    hf_config = values["--speculative-config"]["draft_model_config"]["hf_config"]
    assert hf_config == {"eagle_aux_hidden_state_layer_ids": [0, 2]}
    extra = values["--kv-transfer-config"]["kv_connector_extra_config"]
    assert extra == {"shared_storage_path": "/a b/layers-0-2"}
