"""Command-line flags from pydantic fields, and messages a person can act on when a setting is wrong."""

import argparse
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from server.setting_types import without_credentials

Config = TypeVar("Config", bound=BaseModel)


class SettingsError(Exception):
    """A setting is wrong. The message names it and where it came from."""


def flag(name: str) -> str:
    """`max_num_seqs` as `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel], title: str) -> None:
    """One flag per field of `model`, named after its alias if it has one, with its description and default.

    Values stay strings, for pydantic to read; a flag that is not given is None. Fields that hold several
    values may be given several times.
    """
    group = parser.add_argument_group(title)
    for name, field in model.model_fields.items():
        options: dict[str, Any] = {"dest": name, "default": None, "help": help_text(field)}
        if field.annotation is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = metavar(field)
            if is_several(field):
                options["action"] = "append"
        group.add_argument(flag(field.alias or name), **options)


def parse_flags(arguments: list[str], command: str, model: type[Config]) -> Config:
    """Parse the flags of a subcommand into its settings. Raises SettingsError."""
    parser = argparse.ArgumentParser(
        prog=f"monoloop {command}", description=model.__doc__, allow_abbrev=False
    )
    add_flags(parser, model, "settings")
    given = given_flags(parse_arguments(parser, arguments), model)
    try:
        return model(**given)
    except ValidationError as error:
        raise explain(error, model, {name: flag(name) for name in given}) from None


def parse_arguments(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parse a command line. An unknown flag ends the program (exit code 2) with the closest known one."""
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        options = (name for action in parser._actions for name in action.option_strings)
        known = [name[2:] for name in options if name.startswith("--")]
        names = (argument[2:].partition("=")[0] for argument in unknown if argument.startswith("--"))
        close = [found for name in names if (found := closest(name, known))]
        hint = f"; did you mean {', '.join(map(flag, close))}?" if close else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return given


def given_flags(arguments: argparse.Namespace, model: type[BaseModel]) -> dict[str, Any]:
    """The values of the flags that were given."""
    values = ((name, getattr(arguments, name)) for name in model.model_fields)
    return {name: value for name, value in values if value is not None}


def help_text(field: FieldInfo) -> str:
    """Description and default of a field; where there is none, the description says what happens."""
    text = str(field.description)
    if field.default not in (None, (), PydanticUndefined):
        text += f" (default: {shown_default(field)})"
    return text.replace("%", "%%")  # argparse formats its help


def shown_default(field: FieldInfo) -> str:
    """The default as one would give it."""
    if field.annotation is bool:
        return "on" if field.default else "off"
    return ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)


def members(annotation: Any) -> list[Any]:
    """The types a field may have: the members of a union without None, or the annotation itself."""
    if get_origin(annotation) in (Union, UnionType):
        return [member for member in get_args(annotation) if member is not type(None)]
    return [annotation]


def is_several(field: FieldInfo) -> bool:
    """Check that the field holds a tuple of values."""
    return any(get_origin(member) is tuple for member in members(field.annotation))


def is_text(field: FieldInfo) -> bool:
    """Check that the field's values, or each of several, are text."""
    kinds = [kind for member in members(field.annotation) for kind in (member, *get_args(member))]
    return any(kind in (str, SecretStr, Path) for kind in kinds)


def is_secret(field: FieldInfo | None) -> bool:
    """Check that the field's value must not be shown."""
    if field is None:
        return False
    kinds = members(field.annotation)
    return any(SecretStr in (kind, *get_args(kind)) for kind in kinds)


def metavar(field: FieldInfo) -> str:
    """Return the placeholder of the value in the help: its choices, or its kind."""
    if fixed := choices(field):
        return "{" + ",".join(fixed) + "}"
    return {int: "N", float: "X", Path: "PATH"}.get(members(field.annotation)[0], "TEXT")


def choices(field: FieldInfo) -> list[str]:
    """Return the values of a field that has a fixed set of them."""
    kinds = members(field.annotation)
    return [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]


def explain(error: ValidationError, model: type[BaseModel], origins: Mapping[str, str]) -> SettingsError:
    """Return the error for wrong settings, a line each; `origins` says where a value came from.

    Values of secret fields are not repeated, nor are passwords of addresses.
    """
    lines = []
    for entry in error.errors(include_url=False):
        name = str(entry["loc"][0]) if entry["loc"] else ""
        origin = origins.get(name, name)
        if entry["type"] == "extra_forbidden":
            lines.append(f"{origin}: there is no such setting{did_you_mean(name, model.model_fields)}")
            continue
        line = f"{origin}: {entry['msg'].removeprefix('Value error, ')}"
        if not is_secret(model.model_fields.get(name)):
            line += f" (got {without_credentials(repr(entry['input'])):.200})"
        if entry["type"] == "literal_error" and len(str(entry["input"])) > 3:  # gpu is not a wrong cpu
            line += did_you_mean(str(entry["input"]), choices(model.model_fields[name]))
        lines.append(line)
    return SettingsError("\n".join(lines))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` with the known name that is closest to `name`, "" if none is close."""
    close = closest(name, known)
    return f"; did you mean {close}?" if close else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is closest to `name`; None if none is close."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)
