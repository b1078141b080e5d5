"""A configuration of Ray Serve LLM, for `serve run`.

Reference: Ray 2.60, `ray.serve.llm.LLMConfig`.
"""

from typing import Any

from foredraft.errors import ForedraftError
from foredraft.handover.deployment import Handover
from foredraft.handover.output_format import OutputFormat
from foredraft.handover.text import describe, to_yaml

MODEL_NAME = "served_model_name"  # it becomes the id of the model


def write(handover: Handover) -> str:
    """Return the configuration. Raises ForedraftError for an engine that Ray Serve LLM does not run."""
    engine, deployment = handover.engine, handover.deployment
    if not engine.has_ray:
        raise ForedraftError(
            f"Ray Serve LLM runs vLLM, not {engine.title}; use --engine vllm, or --format kubernetes with this engine"
        )
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": handover.model_name, "model_source": handover.target},
        "engine_kwargs": dict(handover.engine_arguments),
    }
    if handover.drafter.environment:
        config["runtime_env"] = {"env_vars": dict(handover.drafter.environment)}
    application = {
        "name": "llm",
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [config]},
    }
    content = {
        "http_options": {"host": deployment.host, "port": deployment.port},
        "applications": [application],
    }
    return describe(handover, _list_left_out(handover)) + to_yaml(content)


def _list_left_out(handover: Handover) -> list[str]:
    """Return notes on the options of the HTTP server, which Ray Serve replaces."""
    flags = handover.engine.flags
    given = [
        name
        for name in handover.deployment.server_options
        if flags[name].is_equal and flags[name].argument is None and name != MODEL_NAME
    ]
    given += ["api_key"] if handover.deployment.has_api_key else []
    return [f"--{name.replace('_', '-')}: no equal in Ray Serve, which has an HTTP server of its own" for name in given]


FORMAT = OutputFormat("ray", "ray.yaml", write)
