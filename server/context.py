"""State that all routes of an application share: the engine once it is loaded, settings, metrics."""

import logging
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from engine.errors import Draining, InvalidRequest
from server.arrivals import ArrivalLimiter
from server.config import ServerConfig
from server.deadlines import Deadlines
from server.errors import OPENAI, BodyTimeout, Envelope, ModelNotFound, NotReady, error_response
from server.limits import Limits
from server.live import Interval, LiveFeed
from server.metrics import Metrics
from server.open_requests import OpenRequests
from server.parsing.detect import NO_FORMATS, Formats
from server.schema.dialects import Tables
from server.schema.foreign import unknown_fields
from server.schema.misspelled import meant_fields
from server.schema.wire import WireRequest
from server.watch import Watch

if TYPE_CHECKING:
    from engine import Engine

logger = logging.getLogger("monoloop.server")

MAX_UNKNOWN_FIELDS = 200
DRAINING = "The server is shutting down and takes no new requests."


class ServerContext:
    """State of the HTTP side. Lives on the event loop."""

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self.config = config
        self.metrics = metrics
        self.arrivals = ArrivalLimiter()
        self.is_draining = False
        self.returns_request_id = True  # in X-Request-Id
        # The requests whose bodies are on their way.
        self.arriving: Deadlines[Watch] = Deadlines(config.body_timeout_seconds, end_late_body)
        self.open_requests = OpenRequests()
        # Of the endpoints, by handler, path and body: what the application's table says.
        self.route_templates: Mapping[object, str] = {}
        self.envelopes: Mapping[str, Envelope] = {}
        self.probes: Collection[str] = ()
        self.refused: Tables = {}
        self.formats = NO_FORMATS
        self.live = LiveFeed(self._live_interval, self._has_ended)
        self._engine: Engine | None = None
        self._unknown_fields: set[str] = set()

    def _live_interval(self) -> Interval:
        return Interval(self.engine, self.metrics.histogram, self.model_names[0], time.perf_counter())

    def _has_ended(self) -> bool:
        """Check that the engine has died, or has ended all its requests and takes no more."""
        stats = self.engine.stats()
        return not stats.alive or (stats.draining and not stats.running + stats.waiting)

    def attach(self, engine: "Engine") -> None:
        """The model is loaded: from now on requests are answered. Raises SettingsError."""
        self.formats = Formats.of(engine.tokenizer, self.config.tool_parser, self.config.reasoning_parser)
        self._engine = engine
        self.metrics.attach(engine.stats, self.model_names[0], engine.model.max_model_len)

    @property
    def engine(self) -> "Engine":
        """The engine. Raises NotReady while the model still loads."""
        if self._engine is None:
            raise NotReady("The model is still being loaded.")
        return self._engine

    def drain(self) -> None:
        """Take no new requests from now on, nor such whose body has yet to come."""
        self.is_draining = True
        for watch in self.arriving.clear():
            watch.interrupt(Draining(DRAINING))

    def check_ready(self) -> None:
        """Raise NotReady, Draining or EngineDead unless new work would be taken."""
        if self.is_draining or (self._engine is not None and self._engine.is_draining):
            raise Draining(DRAINING)
        self.engine.check_alive()

    def check_healthy(self) -> None:
        """Raise EngineDead, with the reason, unless the process is loading, or its engine is alive."""
        if self._engine is not None:
            self._engine.check_alive()

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names the model answers to; the first is the one in metrics."""
        return self.config.served_model_name or (self.engine.model.name,)

    def model_name(self, asked: str | None) -> str:
        """Return the name to answer with: the requested one if the model has it, or its first.

        Raises ModelNotFound for other names, unless `any_model_name` is set.
        """
        names = self.model_names
        if asked is None or (self.config.any_model_name and asked not in names):
            return names[0]
        if asked not in names:
            raise ModelNotFound(
                f"The model {asked[:200]!r} does not exist here; this server has {', '.join(names)}."
            )
        return asked

    @property
    def limits(self) -> Limits:
        """Return the limits that requests are checked against."""
        return Limits.of(self.engine.model, self.engine.config)

    def note_unknown_fields(
        self, request: type[WireRequest], extra: Mapping[str, Any] | None
    ) -> dict[str, str]:
        """Log each unknown field of a body once, and return those that are misspelled with what they mean.

        The memory of what was logged is bounded. Raises InvalidRequest for a misspelled field, if the setting
        says so.
        """
        names = unknown_fields(extra, self.refused[request])
        misspelled = meant_fields(request, names)
        for name, field in misspelled.items():
            if self.config.misspelled_fields == "refuse":
                raise InvalidRequest(f"There is no field {name}; did you mean {field}?", name)
        for name in names:
            if name not in self._unknown_fields and len(self._unknown_fields) < MAX_UNKNOWN_FIELDS:
                self._unknown_fields.add(name)
                if name in misspelled:
                    logger.warning(
                        "ignoring the unknown request field %s; did you mean %s? (logged once)",
                        name,
                        misspelled[name],
                    )
                else:
                    logger.info("ignoring the unknown request field %.64r (logged once)", name)
        return misspelled

    def route_of(self, scope: Scope) -> str:
        """The route's template, for metrics: from a closed set, never the raw path."""
        return self.route_templates.get(scope.get("endpoint"), "other")

    def error_response(self, error: Exception, scope: Scope) -> Response:
        """Return the response for an error, in the envelope of the API that the path, or one above, has."""
        path = scope["path"]
        while path not in self.envelopes and (above := path.rpartition("/")[0]):
            path = above
        return error_response(error, self.envelopes.get(path, OPENAI))


def end_late_body(watch: Watch) -> None:
    """Interrupt a request whose body takes too long."""
    watch.interrupt(BodyTimeout("The request body did not arrive in time."))


def context_of(request: Request) -> ServerContext:
    """The context of the application that serves `request`."""
    context: ServerContext = request.app.state.context
    return context
