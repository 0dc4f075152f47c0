"""/openapi.json: OpenAPI 3.1 from the schema's models and the table of endpoints.

`python -m server.openapi` prints it. docs/openapi.sha256 holds its digest, so that no change of the API goes
unnoticed: --write stores the digest, --check compares it.
"""

import hashlib
import inspect
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.endpoint import Endpoint
from server.routes.table import ENDPOINTS, REFUSED
from server.schema.chat import ChatChunk
from server.schema.completions import CompletionChunk
from server.schema.foreign import NO_OPS
from server.schema.refused_fields import described

DIGEST_FILE = Path(__file__).parents[1] / "docs" / "openapi.sha256"
Mode = Literal["validation", "serialization"]

REFERENCE = "#/components/schemas/{model}"


@cache
def document() -> dict[str, Any]:
    """The whole document, without a server's address."""
    modes: dict[type[BaseModel], Mode] = {}
    for endpoint in ENDPOINTS:
        if endpoint.request is not None:
            modes[endpoint.request] = "validation"
        for model in (endpoint.response, endpoint.chunk, endpoint.envelope.schema):
            if model is not None:
                modes[model] = "serialization"
    _, definitions = models_json_schema(list(modes.items()), ref_template=REFERENCE)
    schemas = definitions["$defs"]
    for request, refused in REFUSED.items():
        schemas[request.__name__]["properties"] |= described(refused)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        for number, path in enumerate(endpoint.paths):
            template = re.sub(r"{(\w+):path}", r"{\1}", path)
            paths.setdefault(template, {})[endpoint.method.lower()] = operation(endpoint, path, number)
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


def operation(endpoint: Endpoint, path: str, number: int) -> dict[str, Any]:
    """One method of one path, the endpoint's first (number 0) or another."""
    content: dict[str, Any] = {}
    if endpoint.response is not None:
        content["application/json"] = {"schema": reference(endpoint.response)}
    if endpoint.chunk is not None:
        content["text/event-stream"] = {"schema": event_schema(endpoint.chunk, endpoint.envelope.schema)}
    description = inspect.getdoc(endpoint.handler) or ""
    result: dict[str, Any] = {
        "operationId": operation_id(endpoint, number),
        "summary": description.partition("\n")[0],
        "responses": {
            "200": {"description": "answered", **({"content": content} if content else {})},
            "default": {
                "description": "an error",
                "content": {"application/json": {"schema": reference(endpoint.envelope.schema)}},
            },
        },
    }
    if endpoint.is_open:
        result["security"] = [{}]
    if endpoint.request is not None:
        body = {"schema": reference(endpoint.request), "example": endpoint.example}
        result["requestBody"] = {"required": True, "content": {"application/json": body}}
    names = re.findall(r"{(\w+)", path)
    if names:
        result["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return result


def event_schema(chunk: type[BaseModel], error: type[BaseModel]) -> dict[str, Any]:
    """One server-sent event, as OpenAPI describes them since 3.2: `data` is JSON in a string.

    Streams of OpenAI's chunks also have error events and the end mark; other APIs' events include errors.
    """
    data: dict[str, Any] = json_in_string(reference(chunk))
    if chunk in (ChatChunk, CompletionChunk):
        data = {"anyOf": [data, json_in_string(reference(error)), {"const": "[DONE]"}]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def json_in_string(schema: dict[str, Any]) -> dict[str, Any]:
    """A string that holds JSON of a schema."""
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}


def operation_id(endpoint: Endpoint, number: int) -> str:
    """Return an id that is unique in the document: a handler may have several paths and methods."""
    name = endpoint.handler.__name__
    is_first = endpoint is next(other for other in ENDPOINTS if other.handler is endpoint.handler)
    method = "" if is_first else f"_{endpoint.method.lower()}"
    return name + method + (f"_{number + 1}" if number else "")


def reference(model: type[BaseModel]) -> dict[str, str]:
    """A reference to a model's schema."""
    return {"$ref": REFERENCE.format(model=model.__name__)}


def digest() -> str:
    """Return the SHA-256 of the document in hexadecimal, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(document(), sort_keys=True).encode()).hexdigest()


def main(arguments: list[str]) -> int:
    """Print the document, or with --write store its digest; with --check return 1 if that differs."""
    if arguments == ["--write"]:
        DIGEST_FILE.write_text(f"{digest()}\n")
    elif arguments == ["--check"]:
        return int(DIGEST_FILE.read_text().strip() != digest())
    else:
        sys.stdout.write(json.dumps(document(), indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
