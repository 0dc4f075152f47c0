"""Names of unknown fields and the fields they probably mean, with a bound on what is compared."""

import pytest

from server.schema.chat import ChatRequest
from server.schema.completions import CompletionRequest
from server.schema.misspelled import MAX_COMPARED, MAX_LENGTH, meant_field, meant_fields


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


def test_only_a_few_short_names_are_compared() -> None:
    filler = [f"filler_{number}" for number in range(MAX_COMPARED)]
    assert meant_fields(CompletionRequest, [*filler, "temprature"]) == {}
    assert meant_fields(CompletionRequest, [*filler[1:], "temprature"]) == {"temprature": "temperature"}
    assert meant_fields(CompletionRequest, ["temprature" + "_" * MAX_LENGTH]) == {}
