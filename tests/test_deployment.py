"""Deployment files: metrics that the dashboard queries, ports, settings and limits of docker-compose.yml."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.stats import EngineStats
from server.config import ServerConfig
from server.metrics import Metrics

ROOT = Path(__file__).parent.parent
STATS = EngineStats(
    running=0,
    waiting=0,
    pages_used=0,
    pages_cached=0,
    pages_predicted=0,
    pages_free=1,
    page_size=16,
    preemptions_total=0,
    prompt_tokens_total=0,
    cached_prompt_tokens_total=0,
    queried_prompt_tokens_total=0,
    evicted_pages_total=0,
    generation_tokens_total=0,
    steps_total=0,
    mixed_steps_total=0,
    constrained_steps_total=0,
    corrupted_requests_total=0,
    drafts_total=0,
    accepted_drafts_total=0,
    device_idle_seconds_total=0.0,
    device_idle_share=0.0,
    loop_lag_seconds=0.0,
    alive=True,
    draining=False,
)


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def exported_metrics() -> set[str]:
    """The names in /metrics after a request."""
    metrics = Metrics()
    metrics.attach(lambda: STATS, "m", 1024)
    metrics.http_request("GET", "/v1/models", 200, 0.1)
    return set(re.findall(r"^([a-z0-9_:]+)[{ ]", metrics.exposition().decode(), re.MULTILINE))


def test_the_dashboard_queries_only_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "configs/grafana/dashboards/monoloop.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queried = {
        name for query in queries for name in re.findall(r"(?:vllm:|monoloop_|process_)[a-z0-9_]+", query)
    }
    assert len(queried) > 15
    assert queried <= exported_metrics(), f"no such metrics: {queried - exported_metrics()}"


def test_the_dashboard_reads_the_provisioned_data_source() -> None:
    dashboard = json.loads((ROOT / "configs/grafana/dashboards/monoloop.json").read_text())
    sources = read_yaml("configs/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    used = {panel["datasource"]["uid"] for panel in dashboard["panels"]}
    assert used == {source["uid"] for source in sources}


def test_colours_of_single_values_have_thresholds_of_their_own() -> None:
    dashboard = json.loads((ROOT / "configs/grafana/dashboards/monoloop.json").read_text())
    values = [panel for panel in dashboard["panels"] if panel["type"] == "stat"]
    without = [panel["title"] for panel in values if "thresholds" not in panel["fieldConfig"]["defaults"]]
    assert not without, f"Grafana's own threshold shows values from 80 on in red: {without}"


@pytest.mark.parametrize("name", ["monoloop", "monoloop-gpu"])
def test_compose_drains_limits_memory_and_grants_little(name: str) -> None:
    service = read_yaml("docker-compose.yml")["services"][name]
    drain_seconds = float(service["environment"]["MONOLOOP_DRAIN_TIMEOUT_SECONDS"])
    assert float(service["stop_grace_period"].removesuffix("s")) > drain_seconds
    assert service["mem_limit"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    [profile] = service["profiles"]
    assert ("deploy" in service) == (profile == "gpu"), "a GPU is reserved in its profile only"
    assert service["volumes"] == ["models:/models"], "the only place to write to beside /tmp"


def test_prometheus_scrapes_the_port_the_server_listens_on() -> None:
    jobs = read_yaml("configs/prometheus.yml")["scrape_configs"]
    targets = [target for job in jobs for group in job["static_configs"] for target in group["targets"]]
    services = read_yaml("docker-compose.yml")["services"]
    for name in ("monoloop", "monoloop-gpu"):
        [alias] = services[name]["networks"]["default"]["aliases"]
        assert targets == [f"{alias}:{ServerConfig().port}"]


def test_the_image_writes_below_its_volume_only() -> None:
    image = (ROOT / "Dockerfile").read_text()
    folders = re.findall(r"(?:HF_HOME|_CACHE_DIR)=(\S+)", image)
    assert len(folders) == 4
    assert all(Path(folder).is_relative_to("/models") for folder in folders), folders
    assert "\nUSER monoloop\n" in image


def test_the_image_has_the_packages_of_all_settings() -> None:
    image = (ROOT / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"extras\['([\w-]+)'\]", image))
    assert extras == project["optional-dependencies"].keys() - {"dev", "ray"}


def test_compose_sets_only_settings_that_exist() -> None:
    from server.settings import variables

    given = read_yaml("docker-compose.yml")["services"]["monoloop"]["environment"]
    in_image = re.findall(r"(MONOLOOP_\w+)=", (ROOT / "Dockerfile").read_text())
    assert {*given, *in_image} <= set(variables().values())
    assert len(in_image) == 2
