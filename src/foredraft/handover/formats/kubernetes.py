"""A Kubernetes manifest: a Deployment of one pod, and a Service."""

from typing import Any

from foredraft.errors import ForedraftError
from foredraft.handover.deployment import CUDA, Handover
from foredraft.handover.output_format import API_KEY_VARIABLE, OutputFormat
from foredraft.handover.text import CONFIG_NAME, describe, find_image, list_arguments, name_service, to_yaml

CONFIG_FOLDER = "/etc/engine"
LOAD_SECONDS = 1800  # time to load a model, before the pod is started again
STOP_SECONDS = 10  # time to stop beside that for running requests
DEFAULT_DRAIN = 30  # seconds; the default of Kubernetes


def write(handover: Handover) -> str:
    """Return the manifest."""
    name = name_service(handover.engine)
    labels = {"app": name}
    objects: list[dict[str, Any]] = []
    if handover.config:
        objects.append(_make_object("v1", "ConfigMap", name, {"data": {CONFIG_NAME: to_yaml(handover.config)}}))
    pod = {"metadata": {"labels": labels}, "spec": _make_pod(handover)}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": pod}
    objects.append(_make_object("apps/v1", "Deployment", name, {"spec": spec}))
    port = handover.deployment.port
    service = {"selector": labels, "ports": [{"port": port, "targetPort": port}]}
    objects.append(_make_object("v1", "Service", name, {"spec": service}))
    return describe(handover, _list_steps(handover)) + "---\n".join(map(to_yaml, objects))


def _make_object(version: str, kind: str, name: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **content}


def _list_steps(handover: Handover) -> list[str]:
    """Return what to do before the manifest is applied."""
    name = name_service(handover.engine)
    steps = [f"first: {command}" for command in handover.drafter.preparations]
    if handover.drafter.needs_foredraft:
        dockerfile = f"FROM {find_image(handover)}\\nRUN pip install foredraft\\n"
        steps.append(f"first: printf '{dockerfile}' | docker build -t {_name_image(handover)} - , and push it")
    if handover.deployment.has_api_key:
        steps.append(
            f'first: kubectl create secret generic {name} --from-literal=api-key="${API_KEY_VARIABLE}"',
        )
    if handover.folders:
        steps.append("folders are read from the node (hostPath); use a PersistentVolumeClaim in a cluster of several")
    return steps


def _name_image(handover: Handover) -> str:
    return f"foredraft-{name_service(handover.engine)}"


def _make_pod(handover: Handover) -> dict[str, Any]:
    engine, deployment = handover.engine, handover.deployment
    drain = deployment.server_options.get("drain_timeout", DEFAULT_DRAIN)
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, path in enumerate(handover.folders):
        volumes.append({"name": f"folder-{number}", "hostPath": {"path": path}})
        mounts.append({"name": f"folder-{number}", "mountPath": path, "readOnly": True})
    if handover.config:
        volumes.append({"name": "config", "configMap": {"name": name_service(engine)}})
        mounts.append({"name": "config", "mountPath": CONFIG_FOLDER})
    return {
        "terminationGracePeriodSeconds": round(drain) + STOP_SECONDS,
        "containers": [_make_container(handover, mounts)],
        "volumes": volumes,
    }


def _make_container(handover: Handover, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    engine, deployment = handover.engine, handover.deployment
    image = find_image(handover)
    if image is None:
        raise ForedraftError(f"{engine.title} has no image for {deployment.device} here; use --format command")
    key = f"$({API_KEY_VARIABLE})"
    arguments = list_arguments(handover, "0.0.0.0", key, f"{CONFIG_FOLDER}/{CONFIG_NAME}")
    container: dict[str, Any] = {
        "name": "server",
        "image": _name_image(handover) if handover.drafter.needs_foredraft else image,
    }
    if engine.entrypoint:
        container["command"] = list(engine.entrypoint)
    container["args"] = [argument if argument == key else argument.replace("$(", "$$(") for argument in arguments]
    environment: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in handover.drafter.environment.items()
    ]
    if deployment.has_api_key:
        source = {"secretKeyRef": {"name": name_service(engine), "key": "api-key"}}
        environment.append({"name": API_KEY_VARIABLE, "valueFrom": source})
    if environment:
        container["env"] = environment
    probe = {"httpGet": {"path": engine.health_path, "port": deployment.port}, "periodSeconds": 10}
    container["ports"] = [{"containerPort": deployment.port}]
    container["startupProbe"] = probe | {"failureThreshold": LOAD_SECONDS // 10}
    container["readinessProbe"] = probe
    if deployment.device == CUDA:
        container["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    container["volumeMounts"] = mounts
    return container


FORMAT = OutputFormat("kubernetes", "kubernetes.yaml", write)
