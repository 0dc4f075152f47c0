"""The list of all endpoints: what the application routes and what /openapi.json describes."""

from server.endpoint import Endpoint
from server.routes import abort, live, page, profile, status, tokenize
from server.routes.anthropic import messages
from server.routes.native import generate, get_score
from server.routes.openai import chat, completions, embeddings, models, score
from server.routes.responses import create
from server.schema.dialects import refused_tables

ENDPOINTS: tuple[Endpoint, ...] = (
    chat.ENDPOINT,
    completions.ENDPOINT,
    create.ENDPOINT,
    *messages.ENDPOINTS,
    *generate.ENDPOINTS,
    embeddings.ENDPOINT,
    score.ENDPOINT,
    get_score.ENDPOINT,
    *tokenize.ENDPOINTS,
    *models.ENDPOINTS,
    *profile.ENDPOINTS,
    *status.ENDPOINTS,
    live.ENDPOINT,
    abort.ENDPOINT,
)

# What each request refuses follows from the fields of all others.
REFUSED = refused_tables(endpoint.request for endpoint in ENDPOINTS if endpoint.request is not None)


def open_paths() -> set[str]:
    """Return the paths that need no API key for GET.

    The pages show nothing without /openapi.json and /live_stats, which need one.
    """
    opened = {path for endpoint in ENDPOINTS if endpoint.is_open for path in endpoint.paths}
    return opened | page.paths()


def readable_paths() -> set[str]:
    """Return the paths that can be read (GET), where {} is a parameter."""
    return {"/openapi.json", *page.paths()}.union(
        *(endpoint.paths for endpoint in ENDPOINTS if endpoint.method == "GET")
    )
