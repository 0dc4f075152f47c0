"""The version of monoloop."""

from importlib.metadata import PackageNotFoundError, version


def find_version() -> str:
    """The installed version; a source tree that is only on the path has none."""
    try:
        return version("monoloop")
    except PackageNotFoundError:
        return "0.0.0+source"


VERSION = find_version()
