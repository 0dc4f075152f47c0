"""POST /start_profile and /stop_profile: torch's profiler on the device thread, if `profile_dir` is set."""

import time
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequest
from server.context import context_of
from server.endpoint import Endpoint
from server.ids import new_id
from server.schema.models import ProfileFile


async def start_profile(http: Request) -> Response:
    """Record a profile of the steps from now on; they are slower meanwhile."""
    context = context_of(http)
    _folder(http)
    await context.engine.profile.start()
    return Response()


async def stop_profile(http: Request) -> Response:
    """End the profile and write it on the server, for chrome://tracing or Perfetto."""
    context = context_of(http)
    path = _folder(http) / f"profile-{time.strftime('%Y%m%d-%H%M%S')}-{new_id()[:6]}.json.gz"
    try:
        await context.engine.profile.stop(path)
    except OSError as error:
        raise InvalidRequest(f"The profile cannot be written to {path}: {error.strerror}.") from None
    return Response(ProfileFile(path=str(path)).model_dump_json(), media_type="application/json")


def _folder(http: Request) -> Path:
    folder = context_of(http).config.profile_dir
    if folder is None:
        raise InvalidRequest("Profiles are off on this server: start it with --profile-dir FOLDER.")
    if "origin" in http.headers:  # without a body, browsers send a POST of any page without asking
        raise InvalidRequest("Web pages cannot make profiles: send the request without an Origin header.")
    return folder


ENDPOINTS = (
    Endpoint("POST", ("/start_profile",), start_profile),
    Endpoint("POST", ("/stop_profile",), stop_profile, ProfileFile),
)
