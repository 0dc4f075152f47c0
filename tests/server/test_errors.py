"""Errors of a converted request name fields as the client has sent them."""

import pytest

from engine.errors import ContextLengthExceeded, InvalidRequest
from server.errors import renamed_fields

NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("5 of output (max_tokens) are too many", "5 of output (max_output_tokens) are too many"),
        ("max_tokens: got 'max_tokens'", "max_output_tokens: got 'max_tokens'"),
        ("max_tokens and max_tokens", "max_output_tokens and max_tokens"),
        ("schema for response_format 'max_tokens'", "schema for response_format 'max_tokens'"),
        ("min_max_tokens, max_tokens[0], a.max_tokens", "min_max_tokens, max_tokens[0], a.max_tokens"),
    ],
)
def test_the_first_mention_of_a_field_is_renamed(message: str, expected: str) -> None:
    with pytest.raises(InvalidRequest) as raised, renamed_fields(NAMES):
        raise InvalidRequest(message, "max_tokens")
    assert (str(raised.value), raised.value.param) == (expected, "max_output_tokens")


def test_the_kind_of_the_error_and_other_fields_stay() -> None:
    with pytest.raises(ContextLengthExceeded) as raised, renamed_fields(NAMES):
        raise ContextLengthExceeded("too long", "messages[0].content")
    assert raised.value.param == "messages[0].content"
