"""`monoloop serve`: the HTTP server with an engine in the same process."""

from importlib.metadata import PackageNotFoundError, distribution

from server import lifecycle, settings
from server.flags import SettingsError


def main(arguments: list[str]) -> int:
    """Serve a model until a signal or a fault; return the exit code. Raises SettingsError."""
    found = settings.parse(arguments)
    refuse_foreign_kernels()
    return lifecycle.run(found)


def refuse_foreign_kernels() -> None:
    """A package called `kernels` beside ours would be imported in our place. Raises SettingsError."""
    try:
        foreign = distribution("kernels")
    except PackageNotFoundError:
        return
    raise SettingsError(
        f"the package kernels {foreign.version} is installed here and hides monoloop's own kernels folder; "
        "remove it (pip uninstall kernels) or install monoloop into an environment of its own"
    )
