"""/openapi.json: OpenAPI 3.1 from the schema's models and the table of endpoints.

Run as a module it writes the stored copy: python -m server.openapi > docs/openapi.json
"""

import inspect
import json
import re
import sys
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.routes.table import ENDPOINTS, Endpoint
from server.schema.errors import ErrorResponse
from server.schema.fields import CHAT, COMPLETION, NO_OPS, Refused

Mode = Literal["validation", "serialization"]

REFERENCE = "#/components/schemas/{model}"
OPEN_PATHS = ("/health", "/ready", "/version", "/metrics")


@cache
def document() -> dict[str, Any]:
    """The whole document, without a server's address."""
    modes: dict[type[BaseModel], Mode] = {ErrorResponse: "serialization"}
    for endpoint in ENDPOINTS:
        if endpoint.request is not None:
            modes[endpoint.request] = "validation"
        for model in (endpoint.response, endpoint.chunk):
            if model is not None:
                modes[model] = "serialization"
    _, definitions = models_json_schema(list(modes.items()), ref_template=REFERENCE)
    schemas = definitions["$defs"]
    schemas["ChatRequest"]["properties"] |= refused_properties(CHAT)
    schemas["CompletionRequest"]["properties"] |= refused_properties(COMPLETION)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        path = re.sub(r"{(\w+):path}", r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "monoloop",
            "version": "1",
            "description": "An OpenAI-compatible LLM inference server. Unknown fields are ignored; "
            f"known ones without effect are: {', '.join(sorted(NO_OPS))}.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"header": []}, {}],
    }


def operation(endpoint: Endpoint) -> dict[str, Any]:
    """One method of one path."""
    content: dict[str, Any] = {}
    if endpoint.response is not None:
        content["application/json"] = {"schema": reference(endpoint.response)}
    if endpoint.chunk is not None:
        content["text/event-stream"] = {"schema": reference(endpoint.chunk)}
    description = inspect.getdoc(endpoint.handler) or ""
    result: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,
        "summary": description.partition("\n")[0],
        "responses": {
            "200": {"description": "answered", **({"content": content} if content else {})},
            "default": {
                "description": "an error",
                "content": {"application/json": {"schema": reference(ErrorResponse)}},
            },
        },
    }
    if endpoint.path in OPEN_PATHS:
        result["security"] = [{}]
    if endpoint.request is not None:
        body = {"schema": reference(endpoint.request)}
        result["requestBody"] = {"required": True, "content": {"application/json": body}}
    names = re.findall(r"{(\w+)", endpoint.path)
    if names:
        result["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return result


def refused_properties(table: dict[str, Refused]) -> dict[str, Any]:
    """Fields that are only accepted with the values that leave them off."""
    return {
        name: {"enum": [None, *refused.neutral], "description": f"not supported yet. {refused.hint}".strip()}
        for name, refused in table.items()
    }


def reference(model: type[BaseModel]) -> dict[str, str]:
    """A reference to a model's schema."""
    return {"$ref": REFERENCE.format(model=model.__name__)}


def stored_copy() -> str:
    """The document as docs/openapi.json holds it."""
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(stored_copy())
