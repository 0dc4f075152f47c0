"""Settings of `monoloop bench`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from server.commands.client import ClientSettings


class BenchSettings(ClientSettings):
    """Drive a running server with many streams, and print what they saw.

    `monoloop bench static` and `monoloop bench kernel` measure the device alone, without a server.
    """

    requests: int | None = Field(
        None, ge=1, description="requests in all; default: 64, or every request of the workload file"
    )
    concurrency: int = Field(
        16, ge=1, le=10_000, description="streams kept running at a time; not used when a rate is given"
    )
    rate: float | None = Field(
        None,
        gt=0,
        description="requests that arrive per second, however many still run; default: as streams end",
    )
    arrivals: Literal["poisson", "fixed"] = Field("poisson", description="gaps between arrivals at a rate")
    prompt_tokens: int = Field(256, ge=1, description="tokens of each synthetic prompt")
    output_tokens: int = Field(128, ge=1, description="tokens to generate for each; end-of-text is ignored")
    workload: Path | None = Field(
        None,
        description='JSON file with {"requests": [[prompt tokens, output tokens], …]} in place of one length',
    )
    seed: int = Field(0, description="seed of prompts and arrival times")
    timeout_seconds: float = Field(600, gt=0, description="a request that takes longer counts as an error")
    json_file: Path | None = Field(None, alias="json", description="file to write all figures to")
    plot: Path | None = Field(None, description="PNG file to draw the latencies into")
