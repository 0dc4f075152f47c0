"""The settings of the server. Their descriptions make `--help`, the documentation and the sample YAML."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from server.logs import LogFormat
from server.parsing.detect import ReasoningSetting, ToolSetting
from server.setting_types import Address, Names, Origins, RequestPaths, Secrets


class ServerConfig(BaseModel):
    """Settings of everything that speaks HTTP."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes any free one")
    uds: Path | None = Field(
        None,
        description="path of a unix socket to listen on in place of host and port; its user and group may "
        "connect, and a socket that is left over there is replaced",
    )
    ssl_certfile: Path | None = Field(
        None, description="PEM file of a certificate chain: serve HTTPS with it; default: plain HTTP"
    )
    ssl_keyfile: Path | None = Field(
        None, description="PEM file of the certificate's key; default: it is in ssl_certfile"
    )
    served_model_name: Names = Field(
        (),
        description="names clients may use for the model, in the order they are listed; default: its own",
    )
    any_model_name: bool = Field(
        False,
        description="accept every model name in requests (some clients always send dummy) and answer with "
        "the first served one; false: an unknown name is a 404",
    )
    api_key: Secrets = Field(
        (),
        description="keys, one of which clients must send; prefer the environment, since other users see the "
        "flags of a process; default: no key is needed",
    )
    open_paths: RequestPaths = Field(
        (),
        description="paths that can be read (GET) without an API key, under all their names, / and /docs "
        "with their files; none for no path; default: /health, /ready, /metrics, /version, /, /docs",
    )
    key_requests: int | None = Field(
        None,
        ge=1,
        description="most requests of one API key at once; beyond it, 429; without keys, of all clients "
        "together, as the next two; default: no limit",
    )
    key_requests_per_minute: int | None = Field(
        None, ge=1, description="most requests of one API key a minute; beyond it, 429; default: no limit"
    )
    key_tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="most tokens of one API key a minute, of prompts and answers, counted when an answer "
        "ends; beyond it, 429; default: no limit",
    )
    generate_api: Literal["tgi", "lightllm"] = Field(
        "tgi", description="API of /, /generate and /generate_stream: that of TGI or that of LightLLM"
    )
    cors_origins: Origins = Field(
        (), description="origins whose web pages may call the API, * for any; default: none, CORS is off"
    )
    tool_parser: ToolSetting = Field(
        "auto",
        description="format of the model's tool calls; auto: the one its chat template shows, else the "
        "tokenizer's response template; none: tools are refused",
    )
    reasoning_parser: ReasoningSetting = Field(
        "auto",
        description="format of the model's reasoning; auto: the one its chat template shows, else the "
        "tokenizer's response template; none: reasoning is content",
    )
    misspelled_fields: Literal["warn", "refuse"] = Field(
        "warn",
        description="what happens to an unknown request field whose name is close to a known one: warn "
        "ignores it, logs a warning and names both in the header X-Misspelled-Fields; refuse answers 400",
    )
    max_body_bytes: int = Field(
        8 * 2**20, ge=1024, description="most bytes of a request body; beyond it, 413"
    )
    body_timeout_seconds: float = Field(
        30, gt=0, description="seconds a request body may take to arrive; beyond it, 408"
    )
    request_timeout_seconds: float | None = Field(
        None,
        gt=0,
        description="seconds an answer may take; beyond it, it ends with an error; default: no limit",
    )
    send_timeout_seconds: float = Field(
        60,
        gt=0,
        description="seconds an answer waits for a client that has stopped reading; beyond it, its "
        "connection is cut",
    )
    ping_seconds: float = Field(
        15,
        ge=0,
        description="seconds between the comments that keep streams open through proxies; 0: no comments",
    )
    keep_alive_seconds: float = Field(
        65, gt=0, description="seconds an idle connection (or one with a half-sent header) stays open"
    )
    drain_timeout_seconds: float = Field(
        30,
        ge=0,
        description="seconds running requests may take to finish after SIGTERM or Ctrl-C; beyond it, they "
        "end with an error",
    )
    profile_dir: Path | None = Field(
        None,
        description="folder for the profiles of POST /start_profile and /stop_profile; default: they are off",
    )
    metrics_push_url: Address | None = Field(
        None,
        description="address of a Prometheus push gateway that the metrics are sent to, such as "
        "http://gateway:9091; default: they are only scraped",
    )
    metrics_push_seconds: float = Field(10, ge=1, description="seconds between two pushes of the metrics")
    metrics_push_job: str = Field(
        "monoloop", min_length=1, description="name of the job under which the gateway keeps the metrics"
    )
    otlp_endpoint: Address | None = Field(
        None,
        description="address of an OpenTelemetry collector that takes OTLP over HTTP, such as "
        "http://collector:4318; each request is traced to it (needs the extra otel); default: no traces",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level of the messages that are logged"
    )
    log_format: LogFormat = Field(
        "pretty", description="lines for people, or json: every message as one line with a JSON object"
    )
    uvloop: bool = Field(
        True, description="run on uvloop where it is installed, in place of asyncio's own loop"
    )
