"""Names of unknown fields and the fields they probably mean, with a bound on what is compared."""

import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params as legacy_create_params
from openai.types import embedding_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from server.schema.anthropic import MessagesRequest
from server.schema.chat import ChatRequest
from server.schema.completions import CompletionRequest
from server.schema.embeddings import EmbeddingsRequest
from server.schema.foreign import NO_OPS
from server.schema.misspelled import MAX_COMPARED, MAX_LENGTH, meant_field, meant_fields
from server.schema.responses import ResponsesRequest
from server.schema.wire import WireRequest


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("temprature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("top-p", "top_p"),
        ("TOP_K", "top_k"),
        ("n_predct", "n_predict"),  # an alias
        ("peculiar", None),
        ("", None),
        ("témperature", None),
        ("temperature\n", None),
    ],
)
def test_the_closest_field_is_meant(name: str, field: str | None) -> None:
    assert meant_field(CompletionRequest, name) == field


def test_fields_are_those_of_the_request() -> None:
    assert meant_fields(ChatRequest, ["mesages", "promt"]) == {"mesages": "messages"}
    assert meant_fields(CompletionRequest, ["mesages", "promt"]) == {"promt": "prompt"}


@pytest.mark.parametrize(
    ("request_type", "parameters"),
    [
        (ChatRequest, completion_create_params.CompletionCreateParamsBase),
        (CompletionRequest, legacy_create_params.CompletionCreateParamsBase),
        (EmbeddingsRequest, embedding_create_params.EmbeddingCreateParams),
        (ResponsesRequest, response_create_params.ResponseCreateParamsBase),
        (MessagesRequest, message_create_params.MessageCreateParamsBase),
        (MessagesRequest, beta_message_create_params.MessageCreateParamsBase),
    ],
)
def test_no_field_of_the_official_clients_is_taken_for_another(
    request_type: type[WireRequest], parameters: type
) -> None:
    names = {name for base in parameters.__mro__ for name in getattr(base, "__annotations__", {})}
    assert len(names) > 3
    unknown = sorted(names - request_type.model_fields.keys() - NO_OPS)
    assert meant_fields(request_type, unknown) == {}


def test_only_a_few_short_names_are_compared() -> None:
    filler = [f"filler_{number}" for number in range(MAX_COMPARED)]
    assert meant_fields(CompletionRequest, [*filler, "temprature"]) == {}
    assert meant_fields(CompletionRequest, [*filler[1:], "temprature"]) == {"temprature": "temperature"}
    assert meant_fields(CompletionRequest, ["temprature" + "_" * MAX_LENGTH]) == {}
