"""Schemathesis reads /openapi.json, makes requests from it, and holds the answers against it.

A live server gets bodies that fit the document and bodies that do not. None of them may be answered with a
5xx, outlast the time-out, or be answered with something else than what the document describes: JSON of the
endpoint's response, or of its error envelope.
"""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from server.openapi import document
from server.routes.table import ENDPOINTS
from tests.server.conftest import LiveServer

TIMEOUT_SECONDS = 20
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ALIASES = [path for endpoint in ENDPOINTS for path in endpoint.paths[1:]]
SCHEMA = schemathesis.openapi.from_dict(document()).exclude(
    path=[*ALIASES, "/live_stats"]
)  # which does not end
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
CASES = [
    pytest.param(operation, mode, id=f"{operation.label} {mode}")
    for operation in OPERATIONS
    for mode in GenerationMode
    if mode.is_positive or operation.body  # else nothing can be wrong
]


def test_the_document_is_valid() -> None:
    faults = [fault.message for fault in OpenAPIV31SpecValidator(document()).iter_errors()]
    assert faults == []


@pytest.mark.parametrize(("operation", "mode"), CASES)
@settings(
    max_examples=6,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # the bodies are large: to shrink one takes minutes
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_answers_are_as_described(
    live: LiveServer,
    operation: schemathesis.APIOperation,
    mode: GenerationMode,
    data: st.DataObject,
) -> None:
    case = data.draw(operation.as_strategy(mode))
    response = case.call(base_url=live.url, timeout=TIMEOUT_SECONDS)
    case.validate_response(response, checks=CHECKS)
