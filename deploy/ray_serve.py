"""monoloop on Ray Serve: replicas of the application, each a process with an engine, behind Ray's proxies.

    serve run --app-dir deploy ray_serve:application replicas=2 gpus=1 flags="--model Qwen/Qwen3-8B"

ray_serve.yaml is the same for `serve deploy`. Needs `pip install '.[ray]'` on every node.
"""

import shlex

from pydantic import BaseModel
from ray import serve
from ray.serve.config import RequestRouterConfig

from server.hosted import hosted_app
from server.settings import parse

STICKY = {"request_router_class": "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"}
REFUSALS = 64


class Arguments(BaseModel, extra="forbid"):
    """What `serve run` takes as name=value, and a configuration file as `args`."""

    flags: str = ""  # of `monoloop serve`
    replicas: int = 2
    gpus: float = 0  # of each replica
    cpus: float = 1  # of each replica; without a GPU its threads
    sticky: bool = False  # requests with one X-Session-Id go to one replica, others to any


def application(arguments: Arguments) -> serve.Application:
    """Return what Ray Serve runs. Raises SettingsError."""
    settings = parse(shlex.split(arguments.flags))
    deployment = serve.deployment(
        serve.ingress(lambda: hosted_app(settings, host_returns_request_id=True))(),
        name="monoloop",
        num_replicas=arguments.replicas,
        ray_actor_options={"num_gpus": arguments.gpus, "num_cpus": arguments.cpus},
        # More than a replica's own queue takes, which answers 429: Ray would hold requests back silently.
        max_ongoing_requests=settings.engine.max_num_seqs + settings.engine.max_waiting + REFUSALS,
        graceful_shutdown_timeout_s=settings.server.drain_timeout_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2,  # a replica that was killed is replaced so soon
        request_router_config=RequestRouterConfig(**(STICKY if arguments.sticky else {})),
    )
    return deployment.bind()
