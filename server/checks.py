"""Checks of the server's settings that need this machine or the routes; what can be read off a value alone is
checked where it is read."""

from pathlib import Path

from engine.machine_check import obstacle_to_writing
from server.config import ServerConfig
from server.flags import SettingsError, did_you_mean, flag
from server.routes.table import readable_paths
from server.setting_types import NO_PATH


def check_config(config: ServerConfig) -> None:
    """Check what the settings name beside the address, before a model is loaded. Raises SettingsError."""
    check_open_paths(config.open_paths)
    check_profile_dir(config.profile_dir)


def check_open_paths(paths: tuple[str, ...]) -> None:
    """Check that something can be read at each path that is to need no key. Raises SettingsError."""
    known = readable_paths()
    starts = tuple(path.partition("{")[0] for path in known if "{" in path)
    for path in paths:
        if path not in known and not path.startswith(starts) and path != NO_PATH:
            hint = did_you_mean(path, known)
            raise SettingsError(f"{flag('open_paths')}: there is nothing to read (GET) at {path}{hint}")


def check_profile_dir(folder: Path | None) -> None:
    """Check that profiles can be written, if a folder is set for them. Raises SettingsError."""
    if folder is not None and (obstacle := obstacle_to_writing(folder)):
        raise SettingsError(f"{flag('profile_dir')} {folder}: cannot be written ({obstacle})")
