"""GET /v1/models and /v1/models/{id}; ids may hold slashes."""

from starlette.requests import Request
from starlette.responses import Response

from server.context import ServerContext, context_of
from server.endpoint import Endpoint
from server.errors import ModelNotFound
from server.schema.models import ModelCard, ModelList, ModelName


async def list_models(http: Request) -> Response:
    """Every name the model answers to."""
    context = context_of(http)
    cards = [card(context, name) for name in context.model_names]
    return Response(ModelList(data=cards).model_dump_json(), media_type="application/json")


async def get_model(http: Request) -> Response:
    """One of them."""
    context = context_of(http)
    name = http.path_params["model"]
    if not name:  # /v1/models/
        return await list_models(http)
    if name not in context.model_names:
        raise ModelNotFound(f"The model {name[:200]!r} does not exist here.")
    return Response(card(context, name).model_dump_json(), media_type="application/json")


async def get_model_name(http: Request) -> Response:
    """The first of them."""
    body = ModelName(model_name=context_of(http).model_names[0])
    return Response(body.model_dump_json(), media_type="application/json")


def card(context: ServerContext, name: str) -> ModelCard:
    """Return the card of the model under one of its names."""
    model = context.engine.model
    return ModelCard(id=name, created=model.created, root=model.name, max_model_len=model.max_model_len)


ENDPOINTS = (
    Endpoint("GET", ("/v1/models",), list_models, ModelList),
    Endpoint("GET", ("/v1/models/{model:path}",), get_model, ModelCard),
    Endpoint("GET", ("/get_model_name",), get_model_name, ModelName),
    Endpoint("POST", ("/get_model_name",), get_model_name, ModelName),
)
