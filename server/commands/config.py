"""`monoloop config`: prints the settings of `monoloop serve`, and where each came from."""

import sys
from typing import Any

import yaml
from pydantic import BaseModel

from server.flags import is_secret, parse_arguments
from server.setting_types import without_credentials
from server.settings import Settings, add_positional_model, settings_of, settings_parser
from server.terminal import print_status

COMMENT_COLUMN = 40


def main(arguments: list[str]) -> int:
    """Print the merged settings as YAML; return the exit code. Raises SettingsError."""
    parser = settings_parser(
        "config",
        "Print the settings that serve would run with, given the same flags, environment and file, and where "
        "each came from. What is printed is a file for --config, without keys and addresses with passwords.",
    )
    found = settings_of(parse_arguments(add_positional_model(parser), arguments))
    for warning in found.warnings:
        print_status(f"warning: {warning}")
    sys.stdout.write(as_yaml(found))
    return 0


def as_yaml(settings: Settings) -> str:
    """Return all settings as a YAML file, each with its origin as a comment; without secrets."""
    lines = []
    parts: dict[str, BaseModel] = {"server": settings.server, "engine": settings.engine}
    for title, config in parts.items():
        lines.append(f"# --- {title} ---")
        values = config.model_dump(mode="json")
        for name, field in type(config).model_fields.items():
            if is_secret(field):
                line = f"# {name}: {len(values[name])} given, not shown"
            else:
                value = _as_value(values[name])
                shown = without_credentials(value)
                line = f"{name}: {value}" if shown == value else f"# {name}: {shown}"
            lines.append(f"{line:<{COMMENT_COLUMN}}  # {settings.origins.get(name, 'default')}")
    return "\n".join(lines) + "\n"


def _as_value(value: Any) -> str:
    """Return a value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize, allow_unicode=True)
    return text.removesuffix("...\n").strip()
