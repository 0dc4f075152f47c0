"""Reads all settings: those of the server and those of the engine as one flat set of names.

    defaults  <  YAML file (--config)  <  environment (MONOLOOP_<NAME>)  <  flags

Run as a module it writes the sample file: python -m server.settings > configs/default.yaml
"""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BeforeValidator, ValidationError, ValidationInfo, create_model, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engine.config import EngineConfig
from engine.errors import ModelError
from server.config import ServerConfig
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

ENV_PREFIX = "MONOLOOP_"
CONFIG_VARIABLE = "MONOLOOP_CONFIG"
KUBERNETES = (ENV_PREFIX + "SERVICE_", ENV_PREFIX + "PORT_")


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
        if any(isinstance(part, str) and "\0" in part for part in parts):  # no path or address has one
            raise ValueError("holds a NUL character")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def expand_home(cls, value: Any) -> Any:
        """Return a path with `~` expanded where there is such a home: no shell does it in YAML or `--x=~`."""
        with suppress(RuntimeError):
            return value.expanduser() if isinstance(value, Path) else value
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
