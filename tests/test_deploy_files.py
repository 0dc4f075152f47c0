"""Files under deploy/: probes, ports, settings, metrics and times of the unit and the manifests."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.config import ServerConfig
from server.routes import live, profile, status
from server.routes.table import ENDPOINTS
from server.settings import parse, variables
from tests.test_deployment import ROOT, exported_metrics

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "monoloop.service"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
PORT = ServerConfig().port


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(kind: str) -> dict[str, Any]:
    [found] = [document for path in MANIFESTS for document in documents(path) if document["kind"] == kind]
    return found


def container_of(kind: str) -> dict[str, Any]:
    spec = of_kind(kind)["spec"]
    [container] = (spec["template"]["spec"] if "template" in spec else spec)["containers"]
    return container


def unit_values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_every_manifest_names_its_object() -> None:
    for path in MANIFESTS:
        for document in documents(path):
            assert document["apiVersion"] and document["kind"], path.name
            assert document["metadata"]["name"] == "monoloop", path.name


@pytest.mark.parametrize("kind", ["Deployment", "ClusterServingRuntime"])
def test_probes_ask_what_the_server_answers(kind: str) -> None:
    container = container_of(kind)
    [port] = container["ports"]
    assert port["containerPort"] == PORT
    is_open = {path for endpoint in ENDPOINTS if endpoint.is_open for path in endpoint.paths}
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    asked = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert asked == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert set(asked.values()) <= is_open, "a probe sends no API key"
    assert all(probe["httpGet"]["port"] in (port["name"], PORT) for probe in probes.values())
    seconds = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
    assert seconds >= 600, "a model takes minutes to fetch and load"


@pytest.mark.parametrize("kind", ["Deployment", "ClusterServingRuntime"])
def test_containers_start_with_settings_that_exist(kind: str) -> None:
    container = container_of(kind)
    command, *flags = container["args"]
    assert command == "serve"
    parse([flag.replace("{{.Name}}", "name") for flag in flags])
    assert {entry["name"] for entry in container.get("env", ())} <= set(variables().values())
    security = container["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_a_pod_is_killed_only_after_pause_and_drain() -> None:
    pod, container = of_kind("Deployment")["spec"]["template"]["spec"], container_of("Deployment")
    [drain] = [e["value"] for e in container["env"] if e["name"] == "MONOLOOP_DRAIN_TIMEOUT_SECONDS"]
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > pause + float(drain)
    assert pod["enableServiceLinks"] is False, "a Service called monoloop would set MONOLOOP_PORT"
    runtime = container_of("ClusterServingRuntime")
    settings = parse([flag.replace("{{.Name}}", "name") for flag in runtime["args"][1:]]).server
    assert settings.drain_timeout_seconds < 30, "Kubernetes' own grace period"


def test_everything_selects_the_pods_of_the_deployment() -> None:
    deployment = of_kind("Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert of_kind("Service")["spec"]["selector"] == labels
    assert of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    pool = of_kind("InferencePool")["spec"]
    assert pool["selector"]["matchLabels"] == labels
    assert pool["targetPorts"] == [{"number": PORT}]
    [rule] = of_kind("HTTPRoute")["spec"]["rules"]
    [backend] = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == (
        "InferencePool",
        of_kind("InferencePool")["metadata"]["name"],
    )
    scaled = of_kind("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == of_kind("Deployment")["metadata"]["name"]
    assert scaled["minReplicaCount"] >= of_kind("PodDisruptionBudget")["spec"]["minAvailable"] + 1


def test_scaling_and_gateway_read_metrics_that_exist() -> None:
    texts = [(DEPLOY / "kubernetes" / name).read_text() for name in ("scaling.yaml", "gateway.yaml")]
    read = {name for text in texts for name in re.findall(r"vllm:\w+", text)}
    assert len(read) == 4
    assert read <= exported_metrics(), f"no such metrics: {read - exported_metrics()}"


def test_the_unit_waits_longer_than_the_drain() -> None:
    given = dict(value.split("=", 1) for value in unit_values("Environment"))
    settings = {name for name in given if name.startswith("MONOLOOP_")}
    assert settings <= set(variables().values())
    [stop] = unit_values("TimeoutStopSec")
    assert float(stop) > float(given["MONOLOOP_DRAIN_TIMEOUT_SECONDS"])
    assert given["HOME"] == "%S/monoloop" and unit_values("StateDirectory") == ["monoloop"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/monoloop/bin/monoloop", "/bin/true"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=30
    )
    assert (verified.returncode, unit.name in verified.stderr) == (0, False), verified.stderr
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", unit],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert rated.returncode == 0, rated.stdout[-2000:]


def test_nginx_hides_what_one_process_says_of_itself() -> None:
    [pattern] = re.findall(r"location ~ (\S+) \{", (DEPLOY / "nginx.conf").read_text())
    hidden = [
        path for endpoint in (*status.ENDPOINTS, *profile.ENDPOINTS, live.ENDPOINT) for path in endpoint.paths
    ]
    passed_on = [path for endpoint in ENDPOINTS for path in endpoint.paths if path not in hidden]
    for slash in ("", "/"):
        assert [path for path in hidden if not re.search(pattern, path + slash)] == []
        assert [path for path in passed_on if re.search(pattern, path + slash)] == []
