"""The list of all endpoints: what the application routes and what /openapi.json describes."""

from collections.abc import Collection

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


def open_paths(chosen: Collection[str] = ()) -> set[str]:
    """Return the paths that need no API key for GET: `chosen` ones, or by default those of probes and pages.

    A path opens all names of its endpoint, that of a page the files it loads. The pages show nothing without
    /openapi.json and /live_stats, which need a key.
    """
    opened = set(chosen) or page.PAGES | {endpoint.paths[0] for endpoint in ENDPOINTS if endpoint.is_open}
    for endpoint in ENDPOINTS:
        if endpoint.method == "GET" and opened.intersection(endpoint.paths):
            opened.update(endpoint.paths)
    return opened | page.file_paths() if opened & page.PAGES else opened


def readable_paths() -> set[str]:
    """Return the paths that can be read (GET), where {} is a parameter."""
    return {"/openapi.json", *page.PAGES, *page.file_paths()}.union(
        *(endpoint.paths for endpoint in ENDPOINTS if endpoint.method == "GET")
    )
