"""A local Ray that serves deploy/ray_serve.py with FakeEngines, and takes commands from standard input.

A number is that of replicas to have from now on, `kill` ends a replica's process. An answer is one line.
"""

import sys
import time
from pathlib import Path

import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from deploy import ray_serve
from server.hosted import hosted_app
from server.settings import Settings
from tests.server import serve_fake

CONFIG = yaml.safe_load(Path(ray_serve.__file__).with_suffix(".yaml").read_text())


def fake_hosted_app(settings: Settings, **options: bool) -> object:
    serve_fake.install()
    return hosted_app(settings, **options)


def application(arguments: ray_serve.Arguments) -> serve.Application:
    ray_serve.hosted_app = fake_hosted_app
    return ray_serve.application(arguments)


def scale(replicas: int) -> None:
    """Deploy as a configuration file does, and wait until that many replicas run and no others do."""
    [app] = CONFIG["applications"]
    [deployment] = app["deployments"]
    deployment["num_replicas"] = replicas
    app |= {"import_path": "tests.serve_on_ray:application", "args": {"sticky": True}}
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(CONFIG))
    wait_for(replicas)


def wait_for(replicas: int) -> None:
    while True:
        status = serve.status().applications["monoloop"]
        if status.status == "DEPLOY_FAILED":
            sys.exit(f"the deployment failed: {status.message}")
        if status.status == "RUNNING" and status.deployments["monoloop"].replica_states == {
            "RUNNING": replicas
        }:
            return
        time.sleep(0.1)


def names() -> list[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["name"].startswith("SERVE_REPLICA"))


def main(port: int) -> None:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    serve.start(http_options={**CONFIG["http_options"], "host": "127.0.0.1", "port": port})
    for line in sys.stdin:
        command = line.strip()
        if command == "kill":
            before = names()
            ray.kill(ray.get_actor(before[0], namespace="serve"))
            while before[0] in names() or len(names()) < len(before):
                time.sleep(0.1)
            wait_for(len(before))
        else:
            scale(int(command))
        print("done", command, flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
