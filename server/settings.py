"""All settings: those of the server, composed with those of the engine into one flat set of names.

    defaults  <  YAML file (--config)  <  environment (MONOLOOP_<NAME>)  <  flags

Run as a module it writes the sample file: python -m server.settings > configs/default.yaml
"""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engine.config import EngineConfig
from engine.errors import ModelError
from server.flags import (
    SettingsError,
    add_flags,
    did_you_mean,
    explain,
    flag,
    given_flags,
    is_text,
    members,
    parse_arguments,
)
from server.logs import LogFormat
from server.parsing.detect import ReasoningSetting, ToolSetting

ENV_PREFIX = "MONOLOOP_"
CONFIG_VARIABLE = "MONOLOOP_CONFIG"
KUBERNETES = (ENV_PREFIX + "SERVICE_", ENV_PREFIX + "PORT_")


def split_commas(value: Any) -> Any:
    """`a,b` (environment, YAML) and `["a,b", "c"]` (repeated flags) as a list of names."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    names: list[Any] = []
    for part in parts:
        names += [name.strip() for name in part.split(",")] if isinstance(part, str) else [part]
    if "" in names:  # an empty API key would let anyone in
        raise ValueError("holds an empty value")
    return names


Names = Annotated[tuple[str, ...], BeforeValidator(split_commas)]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(split_commas)]


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
    open_paths: Names = Field(
        (),
        description="paths that can be read (GET) without an API key, none for no path; default: /health and "
        "/ready under all their names, /metrics, /version, /docs, and the page with its files",
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
    cors_origins: Names = Field(
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
    metrics_push_url: str | None = Field(
        None,
        pattern=r"^https?://",
        description="address of a Prometheus push gateway that the metrics are sent to, such as "
        "http://gateway:9091; default: they are only scraped",
    )
    metrics_push_seconds: float = Field(10, ge=1, description="seconds between two pushes of the metrics")
    metrics_push_job: str = Field(
        "monoloop", min_length=1, description="name of the job under which the gateway keeps the metrics"
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="address of an OpenTelemetry collector that takes OTLP over HTTP, such as "
        "http://collector:4318; each request is traced to it (needs monoloop[otel]); default: no traces",
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


class Settings(NamedTuple):
    """The settings of `serve`.

    `warnings` is for the log: nothing that ends the start. `origins` says how a setting was given.
    """

    engine: EngineConfig
    server: ServerConfig
    warnings: tuple[str, ...] = ()
    origins: Mapping[str, str] = {}

    def explain(self, error: ModelError | ValueError) -> SettingsError:
        """Return the error of a failed start, with the settings named as they were given, or as flags.

        The engine knows fields: "max_model_len: 9 is too much; raise kv_tokens".
        """

        def given(name: str) -> str:
            return self.origins.get(name, flag(name))

        if isinstance(error, ModelError):
            return SettingsError(f"{given('model')}: {error}")
        return SettingsError(SETTING.sub(lambda found: given(found[0]), str(error)))


def to_int(value: Any) -> Any:
    """Digits as an int, for fields whose values are a fixed set of numbers: a Literal reads no strings."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def flat_fields() -> dict[str, Any]:
    """The fields of both configs: the names that flags, environment and YAML know."""
    fields: dict[str, Any] = {}
    for config in (ServerConfig, EngineConfig):
        for name, field in config.model_fields.items():
            annotation: Any = field.annotation
            if any(
                get_origin(kind) is Literal and isinstance(get_args(kind)[0], int)
                for kind in members(annotation)
            ):
                annotation = Annotated[annotation, BeforeValidator(to_int)]
            fields[name] = (annotation, field)
    return fields


class Sources(BaseSettings):
    """Flags (as keyword arguments) before environment before YAML file."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        enable_decoding=False,
        extra="forbid",
        hide_input_in_errors=True,
    )
    file_values: ClassVar[dict[str, Any]] = {}

    @field_validator("*", mode="before")
    @classmethod
    def check_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML has its own idea of kinds, and `port: true` would be port 1. Empty text is no value."""
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        parts = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(part, bool) for part in parts) and bool not in members(field.annotation):
            raise ValueError("must not be true or false")
        if is_text(field) and any(isinstance(part, int | float | date) for part in parts):
            raise ValueError("must be text: in YAML, put it in quotes")
        if isinstance(value, str) and not value.strip():
            raise ValueError("holds an empty value")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The order of the sources, the strongest first."""
        return init_settings, env_settings, InitSettingsSource(settings_cls, cls.file_values)


# A setting's name in a message: in front, or with an underscore, which sets it off from a word. A file may
# have the same name, with an ending or in a folder.
SETTING = re.compile(
    "|".join(
        rf"(?<![\w./-]){name}(?![\w/-]|\.\w)" if "_" in name else rf"\A{name}(?=:)"
        for name in EngineConfig.model_fields
    )
)
FlatSettings = create_model("FlatSettings", __base__=Sources, **flat_fields())

# Other ways to give a setting on the command line. vLLM's names let its start scripts move over; its
# --served-model-name, --max-model-len and --gpu-memory-utilization are the names of settings here.
POSITIONAL_MODEL = "MODEL"
VLLM_FLAGS = {"--max-num-batched-tokens": "token_budget", "--enable-prefix-caching": "prefix_cache"}


def settings_parser(
    command: str = "serve", description: str = "Serve a model over the OpenAI API."
) -> argparse.ArgumentParser:
    """Return the parser of a command with all flags of `monoloop serve`."""
    parser = argparse.ArgumentParser(
        prog=f"monoloop {command}",
        description=description,
        epilog="Every setting may also be in the YAML file, under the flag's name with underscores, "
        f"and in the environment as {ENV_PREFIX}<NAME>. Flags win over the environment, that over the file.",
        allow_abbrev=False,
    )
    add_config_flag(parser)
    add_flags(parser, ServerConfig, "server")
    add_flags(parser, EngineConfig, "engine")
    group = parser.add_argument_group("names of vLLM")
    for alias, name in VLLM_FLAGS.items():
        is_switch = EngineConfig.model_fields[name].annotation is bool
        options: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction} if is_switch else {"metavar": "N"}
        )
        group.add_argument(alias, dest=alias, default=None, help=f"as {flag(name)}", **options)
    return parser


def add_positional_model(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let the first argument name the model; return the parser."""
    parser.add_argument(POSITIONAL_MODEL, nargs="?", help="the model to serve, as --model")
    return parser


def parse(arguments: list[str]) -> Settings:
    """Settings of `monoloop serve`, from its flags, the environment and the YAML file.

    Raises SettingsError, naming the setting and where it came from; argparse ends the program itself for
    an unknown flag (exit code 2) and for --help.
    """
    return settings_of(parse_arguments(add_positional_model(settings_parser()), arguments))


def settings_of(namespace: argparse.Namespace) -> Settings:
    """Return the settings from a command line of settings_parser(), environment and YAML file.

    Raises SettingsError, naming the setting and where it came from.
    """
    flags = given_flags(namespace, ServerConfig) | given_flags(namespace, EngineConfig)
    names = {name: flag(name) for name in flags}
    for alias, name in {POSITIONAL_MODEL: "model", **VLLM_FLAGS}.items():
        if (value := getattr(namespace, alias, None)) is None:
            continue
        if name in flags:
            hint = "; several names: --served-model-name A,B" if "served_model_name" in flags else ""
            raise SettingsError(
                f"{alias} ({value}) and {names[name]} ({flags[name]}) are the same setting: give one{hint}"
            )
        flags[name], names[name] = value, alias
    return load(flags, config_file(namespace.config), names)


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the YAML file."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"YAML file with settings (or {CONFIG_VARIABLE})"
    )


def config_file(given: Path | None = None) -> Path | None:
    """Return the YAML file that the flag gave or else the environment names; None if neither does."""
    file = given or os.environ.get(CONFIG_VARIABLE)
    return Path(file) if file else None


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that find_cache_dir() reads."""
    add_config_flag(parser)
    parser.add_argument(
        "--cache-dir",
        type=Path,
        help=f"folder for fetched models; default: that of `serve` ({ENV_PREFIX}CACHE_DIR, or "
        "cache_dir of the YAML file)",
    )


def find_cache_dir(namespace: argparse.Namespace) -> Path | None:
    """Return the folder for fetched models from the sources of `monoloop serve`; None is the default.

    Raises SettingsError if a setting is wrong; where the flag names the folder, no other source is read.
    """
    given: Path | None = namespace.cache_dir
    return load({}, config_file(namespace.config)).engine.cache_dir if given is None else given


def load(flags: dict[str, Any], file: Path | None = None, names: Mapping[str, str] | None = None) -> Settings:
    """Merge the sources and check every value. Raises SettingsError.

    `names` says how each flag was written; by default it is the setting's own.
    """
    values = {} if file is None else read_yaml(file)
    sources = type("FileSettings", (FlatSettings,), {"__annotations__": {}, "file_values": values})
    origins = {name: f"{file}: {name}" for name in values}
    given = {name.upper() for name, value in os.environ.items() if value}  # pydantic reads any case
    origins |= {name: variable for name, variable in variables().items() if variable in given}
    origins |= {name: flag(name) for name in flags} if names is None else names
    try:
        flat = sources(**flags)
    except ValidationError as error:
        raise explain(error, FlatSettings, origins) from None
    settings = flat.model_dump()
    return Settings(
        engine=EngineConfig(**{name: settings[name] for name in EngineConfig.model_fields}),
        server=ServerConfig(**{name: settings[name] for name in ServerConfig.model_fields}),
        warnings=unknown_variables(),
        origins=origins,
    )


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping a settings file holds. Raises SettingsError if there is none."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read ({error.strerror})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SettingsError(f"{file}: is not valid YAML{place}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # bad bytes, a 13th month, 1,000 brackets
        raise SettingsError(f"{file}: is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise SettingsError(f"{file}: must hold settings as `name: value`, one a line")
    return values


def variables() -> dict[str, str]:
    """The environment variable of each setting."""
    return {name: ENV_PREFIX + name.upper() for name in FlatSettings.model_fields}


def unknown_variables() -> tuple[str, ...]:
    """A warning for each MONOLOOP_ variable that is no setting.

    Not an error: Kubernetes puts MONOLOOP_SERVICE_HOST and the like into the environment of every container
    beside a service called monoloop.
    """
    known = {*variables().values(), CONFIG_VARIABLE}
    return tuple(
        f"{variable} is not a setting and is ignored{did_you_mean(variable, known)}"
        for variable in sorted(os.environ)
        if variable.startswith(ENV_PREFIX) and variable not in known and not variable.startswith(KUBERNETES)
    )


def sample_yaml() -> str:
    """Every setting, commented out, with its description and default."""
    lines = [
        "# Settings of `monoloop serve --config FILE`. Every line is a default: uncomment what you change.",
        f"# Each may also be a flag (--max-num-seqs) or in the environment ({ENV_PREFIX}MAX_NUM_SEQS).",
    ]
    for title, config in (("server", ServerConfig), ("engine", EngineConfig)):
        lines += ["", f"# --- {title} ---"]
        for name, field in config.model_fields.items():
            default = field.get_default()
            value = list(default) if isinstance(default, tuple) else default
            lines += ["", *(f"# {line}" for line in textwrap.wrap(str(field.description), 106))]
            lines.append(
                f"# {name}: " + yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(sample_yaml())
