"""The files of deploy/ agree with the server and each other: options, routes, ports, times, users, paths, metrics."""

import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

import foredraft
from foredraft.server.app import create_app
from foredraft.server.lifecycle import FLUSH_SECONDS
from foredraft.server.service import Service
from foredraft.server.settings import ServerSettings
from tests.support.deployments import (
    DEPLOY,
    DOCKERFILE,
    MANIFESTS,
    list_deployments,
    read_manifests,
    read_unit,
    read_yaml,
)

ROOT = DEPLOY.parent
DASHBOARD = ROOT / "src" / "foredraft" / "server" / "grafana.json"
PAGE = (ROOT / "docs" / "deploy.md").read_text("utf-8")
PORT = 8000
DEPLOYMENTS = list_deployments()
COMPOSE = read_yaml("compose.yaml")
OBJECTS = read_manifests()
POD = OBJECTS["Deployment"]["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.fixture(scope="module")
def routes() -> set[str]:
    service = Service(ServerSettings())
    try:
        return set(create_app(service).openapi()["paths"])
    finally:
        service.close()


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment.name)
def test_the_command_line_takes_the_arguments(deployment):
    options = deployment.options
    assert options["port"] == PORT
    assert options["host"] == ("127.0.0.1" if deployment.name == "systemd" else "0.0.0.0")
    assert options["api_key"] is None, "a key among the arguments is visible to every process of the machine"


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment.name)
def test_the_server_has_time_to_drain(deployment):
    assert "--drain-timeout" in deployment.arguments, "both numbers stand side by side"
    assert deployment.grace >= deployment.pause + deployment.options["drain_timeout"] + 2 * FLUSH_SECONDS


def test_every_route_that_is_asked_exists(routes):
    asked = {CONTAINER[probe]["httpGet"]["path"] for probe in PROBES}
    asked |= {job["metrics_path"] for job in read_yaml("prometheus.yml")["scrape_configs"]}
    asked.add(OBJECTS["Deployment"]["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"])
    asked |= set(re.findall(r'"(/\w+)"', (DEPLOY / "healthcheck.py").read_text("utf-8")))
    assert {"/health", "/ready", "/metrics"} == asked
    assert asked <= routes


def test_readiness_and_liveness_ask_different_routes():
    """A server that drains, or whose queue is full, must get no requests, but must not be killed."""
    paths = {probe: CONTAINER[probe]["httpGet"]["path"] for probe in PROBES}
    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert {CONTAINER[probe]["httpGet"]["port"] for probe in PROBES} == {CONTAINER["ports"][0]["name"]}


def test_ports_agree():
    service = OBJECTS["Service"]["spec"]["ports"][0]
    annotations = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    [job] = read_yaml("prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"foredraft:{PORT}"]}]
    assert "foredraft" in COMPOSE["services"]
    assert service["targetPort"] == CONTAINER["ports"][0]["name"]
    assert {CONTAINER["ports"][0]["containerPort"], service["port"], int(annotations["prometheus.io/port"])} == {PORT}
    assert DOCKERFILE.find_last("cpu", "EXPOSE") == str(PORT)
    assert runpy.run_path(str(DEPLOY / "healthcheck.py"))["PORT"] == PORT
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "no port is open to the network"


def test_no_container_runs_as_root():
    user, group = map(int, (DOCKERFILE.find_last("cpu", "USER") or "0:0").split(":"))
    assert POD["securityContext"]["runAsNonRoot"] is True
    ids = [POD["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")]
    assert ids == [user, group, group]
    for name, service in COMPOSE["services"].items():
        assert service["cap_drop"] == ["ALL"]
        assert name == "foredraft" or int(service["user"].partition(":")[0]) > 0
    assert read_unit()["Service"]["DynamicUser"] == "yes"


def test_the_root_file_system_is_read_only_and_caches_are_volumes():
    context = CONTAINER["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    [volume] = json.loads(DOCKERFILE.find_last("cpu", "VOLUME") or "[]")
    assert f"HF_HOME={volume}/" in (DOCKERFILE.find_last("cpu", "ENV") or "")
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert {volume, "/tmp"} == set(mounts)
    assert set(mounts.values()) == {found["name"] for found in POD["volumes"]}
    server = COMPOSE["services"]["foredraft"]
    assert server["read_only"] is True
    assert [mount.split(":")[1] for mount in server["volumes"]] + server["tmpfs"] == [volume, "/tmp"]


def test_everything_that_compose_mounts_exists():
    mounts = [mount for service in COMPOSE["services"].values() for mount in service["volumes"]]
    folders = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]
    assert len(folders) == 4
    for folder in folders:
        assert (DEPLOY / folder).is_file(), folder
    names = {mount.split(":")[0] for mount in mounts if not mount.startswith(".")}
    assert names == set(COMPOSE["volumes"])
    build = COMPOSE["services"]["foredraft"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert build["target"] in DOCKERFILE.targets
    assert read_yaml("compose.cuda.yaml")["services"]["foredraft"]["build"]["target"] in DOCKERFILE.targets
    assert set(build["args"]) <= set(DOCKERFILE.arguments)


def test_grafana_finds_prometheus_and_the_dashboard():
    [source] = read_yaml("grafana/datasources.yml")["datasources"]
    host, port = re.fullmatch(r"http://(\w+):(\d+)", source["url"]).groups()
    assert f"127.0.0.1:{port}:{port}" in COMPOSE["services"][host]["ports"]
    assert source["isDefault"], "the dashboard's variable begins with the default source"
    assert source["jsonData"]["timeInterval"] == read_yaml("prometheus.yml")["global"]["scrape_interval"]
    [provider] = read_yaml("grafana/dashboards.yml")["providers"]
    mounts = dict(mount.split(":")[:2] for mount in COMPOSE["services"]["grafana"]["volumes"])
    [target] = [mounts[source] for source in mounts if (DEPLOY / source).resolve() == DASHBOARD]
    assert Path(target).parent == Path(provider["options"]["path"])


def test_images_are_pinned_and_ours_have_the_version_of_the_package():
    images = [service["image"] for service in COMPOSE["services"].values()]
    images.append(read_yaml("compose.cuda.yaml")["services"]["foredraft"]["image"])
    for manifest in MANIFESTS:
        images += re.findall(r"image: (\S+)", manifest.read_text("utf-8"))
    assert len(images) == 6
    for image in images:
        name, _, tag = image.rpartition(":")
        assert re.search(r"\d+\.\d+", tag), image
        if name.endswith("foredraft"):
            assert tag in (f"{foredraft.__version__}-cpu", f"{foredraft.__version__}-cuda")


def test_the_key_comes_from_outside():
    [variable] = [found for found in CONTAINER["env"] if found["name"] == "FOREDRAFT_API_KEY"]
    secret = variable["valueFrom"]["secretKeyRef"]
    assert f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}=" in PAGE
    assert COMPOSE["services"]["foredraft"]["environment"]["FOREDRAFT_API_KEY"].startswith("${FOREDRAFT_API_KEY:?")
    unit = read_unit()["Service"]
    assert unit["EnvironmentFile"] in PAGE
    assert "API_KEY" not in unit["Environment"] + unit["ExecStart"]


def test_selectors_find_the_pods():
    labels = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["Service"]["spec"]["selector"] == labels
    assert OBJECTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    [spread] = POD["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == labels
    [patch] = read_yaml("kubernetes/cuda.yaml")["spec"]["template"]["spec"]["containers"]
    assert patch["name"] == CONTAINER["name"]


def test_the_autoscaler_reads_a_metric_that_the_page_makes_of_ours():
    spec = read_yaml("kubernetes/autoscaler.yaml")["spec"]
    target = spec["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", OBJECTS["Deployment"]["metadata"]["name"])
    [metric] = spec["metrics"]
    [rules] = [found["rules"] for found in map(yaml.safe_load, find_blocks()) if "rules" in found]
    [rule] = rules
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    [series] = re.findall(r'__name__="([\w:]+)"', rule["seriesQuery"])
    # tests/server/test_metrics.py checks that the server has every metric of the dashboard
    assert f"{series}{{" in DASHBOARD.read_text("utf-8")
    kubernetes = next(deployment for deployment in DEPLOYMENTS if deployment.name == "kubernetes")
    assert int(metric["pods"]["target"]["averageValue"]) <= kubernetes.options["max_batch"]


def find_blocks() -> list[str]:
    """Find the YAML of the page."""
    return re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def test_the_unit_leaves_the_drain_to_the_server():
    unit = read_unit()["Service"]
    assert (unit["KillMode"], unit["KillSignal"]) == ("mixed", "SIGTERM")
    assert unit["ProtectSystem"] == "strict"
    assert unit["NoNewPrivileges"] == "yes"
    cache = f"/var/cache/{unit['CacheDirectory']}"
    assert unit["Environment"].startswith(f"HF_HOME={cache}/")


def test_the_page_names_every_file():
    for file in DEPLOY.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith("."):
            assert file.relative_to(DEPLOY).as_posix() in PAGE, file
