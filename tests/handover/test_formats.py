"""Written handovers: valid shell, valid YAML, the same arguments in all, and no secret in any."""

import shlex
from dataclasses import replace

import pytest
import yaml

from foredraft import zoo
from foredraft.draft_length.length_table import LengthTable
from foredraft.errors import ForedraftError
from foredraft.handover.deployment import Deployment
from foredraft.handover.drafter_plan import HandoverChoices
from foredraft.handover.output_format import find_format, load_formats
from foredraft.handover.plan import plan_handover
from foredraft.handover.registry import load_engines
from foredraft.vllm.settings import SETTINGS_VARIABLE

TARGET = str(zoo.find_folder("target"))
DEPLOYMENT = Deployment(
    target=TARGET,
    method="ngram",
    lengths=LengthTable.parse(4),
    drafter_options={"prompt_lookup_max": 3},
    server_options={"max_model_len": 512, "no_prefix_cache": True, "served_model_name": ["a"], "drain_timeout": 7.0},
    port=9000,
    has_api_key=True,
)
ENGINES = load_engines()


def make(engine="vllm", deployment=DEPLOYMENT):
    return plan_handover(deployment, ENGINES[engine], HandoverChoices())


def write(fmt, engine="vllm", deployment=DEPLOYMENT):
    return find_format(fmt).write(make(engine, deployment))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_command_has_every_flag_once(engine):
    text = write("command", engine)
    command = text.rsplit("EOF\n", 1)[-1]
    words = [word for word in shlex.split(command, comments=True) if word != "\n"]
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len(set(flags))
    assert words[words.index("--port") + 1] == "9000"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_compose_file_has_the_arguments_of_the_command(engine):
    text = write("compose", engine)
    [service] = yaml.safe_load(text)["services"].values()
    handover = make(engine)
    assert set(handover.flags) <= set(service["command"])
    assert service["ports"] == ["127.0.0.1:9000:9000"]
    assert "${FOREDRAFT_API_KEY:?}" in text or ENGINES[engine].api_key_flag is None
    for folder in handover.folders:
        assert f"{folder}:{folder}:ro" in service["volumes"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_manifest_has_a_deployment_and_a_service(engine):
    objects = list(yaml.safe_load_all(write("kubernetes", engine)))
    kinds = [one["kind"] for one in objects]
    assert kinds[-2:] == ["Deployment", "Service"]
    pod = objects[-2]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert set(make(engine).flags) <= set(container["args"])
    assert pod["terminationGracePeriodSeconds"] == 17
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": 9000}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_configuration_file_travels_in_every_format():
    expected = {
        "speculative_config": {
            "decoding_type": "NGram",
            "max_draft_len": 4,
            "max_matching_ngram_size": 3,
            "is_public_pool": False,
        },
        "kv_cache_config": {"enable_block_reuse": False},
        "disable_overlap_scheduler": True,
    }
    script = write("command", "trtllm")
    assert yaml.safe_load(script.split("<<'EOF'\n")[1].split("EOF\n")[0]) == expected
    compose = yaml.safe_load(write("compose", "trtllm"))
    assert yaml.safe_load(compose["configs"]["engine"]["content"]) == expected
    manifest = next(yaml.safe_load_all(write("kubernetes", "trtllm")))
    assert yaml.safe_load(manifest["data"]["engine.yaml"]) == expected


def test_ray_serve_gets_the_arguments_of_the_engine():
    [application] = yaml.safe_load(write("ray"))["applications"]
    [config] = application["args"]["llm_configs"]
    assert config["model_loading_config"] == {"model_id": "a", "model_source": TARGET}
    assert config["engine_kwargs"] == {
        "max_model_len": 512,
        "enable_prefix_caching": False,
        "speculative_config": {
            "method": "custom_class",
            "model": "foredraft.vllm.Proposer",
            "num_speculative_tokens": 4,
        },
    }
    assert SETTINGS_VARIABLE in config["runtime_env"]["env_vars"]
    text = write("ray")
    assert "--drain-timeout: no equal in Ray Serve" in text
    assert "--api-key: no equal in Ray Serve" in text


@pytest.mark.parametrize("engine", sorted(ENGINES.keys() - {"vllm"}))
def test_ray_serve_runs_no_other_engine(engine):
    with pytest.raises(ForedraftError, match="use --engine vllm"):
        write("ray", engine)


def test_foredraft_is_installed_where_it_drafts():
    [service] = yaml.safe_load(write("compose"))["services"].values()
    assert service["build"]["dockerfile_inline"] == "FROM vllm/vllm-openai:v0.32.0\nRUN pip install foredraft\n"
    assert "image" not in service
    assert "docker build -t foredraft-vllm" in write("kubernetes")
    assert "pip install foredraft" in write("command")


def test_an_engine_without_an_image_for_the_device_is_refused():
    on_cpu = replace(DEPLOYMENT, device="cpu")
    for fmt in ("compose", "kubernetes"):
        with pytest.raises(ForedraftError, match="use --format command"):
            write(fmt, "vllm", on_cpu)
    assert "gpu" not in write("compose", "llama.cpp", on_cpu).partition("services")[2]


def test_texts_with_signs_of_compose_and_kubernetes_stay_as_they_are():
    odd = replace(DEPLOYMENT, server_options={"served_model_name": ["a$b$(c)"]})
    [service] = yaml.safe_load(write("compose", "sglang", odd))["services"].values()
    assert "a$$b$$(c)" in service["command"]
    container = list(yaml.safe_load_all(write("kubernetes", "sglang", odd)))[-2]["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert "a$b$$(c)" in container["args"]
    assert "'a$b$(c)'" in write("command", "sglang", odd)


def test_differences_are_comments_in_every_format():
    said = replace(DEPLOYMENT, server_options={"request_timeout": 5.0})
    for name in load_formats():
        comments = [line for line in write(name, deployment=said).splitlines() if line.startswith("#")]
        assert any("--request-timeout: no equal in vLLM" in line for line in comments), name


def test_a_value_that_the_engine_does_not_take_is_said_and_left_out():
    said = replace(DEPLOYMENT, server_options={"dtype": "float64"})
    text = write("command", deployment=said)
    assert "--dtype float64: vLLM takes" in text
    assert "  --dtype" not in text
