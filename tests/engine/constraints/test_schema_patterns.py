"""Patterns and formats that libraries write are enforced, or are annotations."""

import json
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from engine.constraints.schema_patterns import KNOWN_PATTERNS, MAX_LENGTHS, readable_strings
from engine.constraints.schema_rewrite import byte_tokenizer, ready
from tests.engine.constraints.test_schema_rewrite import written

# Python's expressions know no properties of characters.
WITHOUT_PROPERTIES = [pattern for pattern in KNOWN_PATTERNS if "\\p{" not in pattern]


@settings(max_examples=300)
@given(data=st.data(), old=st.sampled_from(WITHOUT_PROPERTIES))
def test_patterns_without_look_around_match_what_those_with_it_do(data: st.DataObject, old: str) -> None:
    new = KNOWN_PATTERNS[old]
    letters = st.text("a1.+-@_'\nPTWYS,", max_size=12)
    text = data.draw(st.sampled_from([st.from_regex(new["pattern"]), letters]).flatmap(lambda source: source))
    text = text.rstrip("\n")
    is_match = bool(re.search(new["pattern"], text, re.ASCII)) and len(text) <= new.get("maxLength", 10**6)
    if "maxLength" in new:  # of a hostname: it may not end in a dot
        text = text.removesuffix(".") if not is_match else text
        is_match = bool(re.search(new["pattern"], text, re.ASCII)) and len(text) <= new["maxLength"]
    assert bool(re.search(old, text, re.ASCII)) == is_match, repr(text)


@pytest.mark.parametrize("pattern", WITHOUT_PROPERTIES)
def test_patterns_of_libraries_are_enforced(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    texts = [text for seed in range(30) if (text := written(schema, seed, 400)) is not None]
    assert texts and all(re.search(pattern, json.loads(text)) for text in texts), texts


def test_emoji_are_enforced() -> None:
    [pattern] = KNOWN_PATTERNS.keys() - set(WITHOUT_PROPERTIES)
    texts = [
        text
        for seed in range(30)
        if (text := written({"type": "string", "pattern": pattern}, seed)) is not None
    ]
    for text in texts:
        assert all(unicodedata.category(char)[0] in "SNPMC" for char in json.loads(text)), text
        assert not json.loads(text).isascii(), "digits alone are no emoji"


@pytest.mark.parametrize("form", ["password", "binary", "path", "nanoid", "e164", "ipvanyaddress", "int64"])
def test_formats_that_json_schema_does_not_know_are_annotations(form: str) -> None:
    assert ready({"type": "string", "format": form}) == {"type": "string"}
    with_pattern = {"type": "string", "format": form, "pattern": "^a$"}
    assert ready(with_pattern) == {"type": "string", "pattern": "^a$"}


@pytest.mark.parametrize("form", ["uri-reference", "regex", "json-pointer", "iri", "idn-email", "email"])
def test_formats_of_json_schema_stay(form: str) -> None:
    assert ready({"type": "string", "format": form}) == {"type": "string", "format": form}


@pytest.mark.parametrize(
    ("node", "most"),
    [
        ({"format": "time"}, 24),
        ({"format": "date-time"}, 35),
        ({"format": "duration", "maxLength": 100}, 40),
        ({"format": "duration", "maxLength": 10}, 10),
        ({"format": "duration", "minLength": 40}, None),
        ({"format": "date"}, None),
    ],
)
def test_formats_have_no_endless_digits(node: dict[str, Any], most: int | None) -> None:
    assert readable_strings(node).get("maxLength") == most
    if most in MAX_LENGTHS.values():
        texts = [written({"type": "string", **node}, seed, 60) for seed in range(10)]
        assert all(text is not None and len(json.loads(text)) <= most for text in texts)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("time", ["10:28:60Z", "04:37:59.123456789+10:10"], ["10:28:60.1234567891Z"]),
        (
            "date-time",
            ["2025-01-31T23:59:59.123456789-01:30", "2025-01-31t23:59:59z"],
            ["2025-01-31T23:59:59.1234567891Z"],
        ),
        (
            "duration",
            ["P1234567890D", "PT1H30M5S", "P2W", "P1Y2M3DT4H5M6S", "P1M"],
            ["P12345678901D", "PT1H12345678901M"],
        ),
    ],
)
def test_numbers_of_dates_have_as_many_digits_as_libraries_read(
    form: str, good: list[str], bad: list[str]
) -> None:
    grammar = LLMatcher.grammar_from_json_schema(ready({"type": "string", "format": form}))
    for text, is_allowed in (*((text, True) for text in good), *((text, False) for text in bad)):
        matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
        whole = json.dumps(text).encode()
        assert (matcher.try_consume_tokens(list(whole)) == len(whole)) == is_allowed, text
    own = {"type": "string", "format": form, "pattern": "^[P1]"}
    assert ready(own)["pattern"] == "^[P1]"


def test_versions_of_uuids_are_enforced() -> None:
    for seed in range(5):
        text = written({"type": "string", "format": "uuid4"}, seed)
        assert text is not None and re.fullmatch(r'"[\da-fA-F-]{14}4[\da-fA-F-]{21}"', text)
