"""Fields that only chat and completions have reach the engine, and are checked on the way."""

from typing import Any

import httpx
import pytest

from engine.request import RepetitionStop
from tests.server.fake_engine import FakeEngine
from tests.server.test_aliases import BOTH, CHAT, TEXT, error_of


@BOTH
async def test_repetition_stop_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    for times in (2, 4096):
        options = {"ngram": 1, "times": times}
        response = await client.post(path, json=body | {"repetition_stop": options})
        assert response.status_code == 200, response.text
        assert engine.requests[-1].sampling.repetition_stop == RepetitionStop(1, times)
    await client.post(path, json=body | {"repetition_stop": None})
    assert engine.requests[-1].sampling.repetition_stop is None


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ngram": 3},
        {"times": 3},
        {"ngram": 0, "times": 2},
        {"ngram": 1, "times": 1},
        {"ngram": True, "times": 2},
        {"ngram": 1.5, "times": 2},
        {"ngram": 2, "times": 2049},
        True,
        3,
    ],
)
async def test_invalid_repetition_is_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], options: Any
) -> None:
    param, _ = await error_of(client, path, body | {"repetition_stop": options})
    assert param.startswith("repetition_stop")


@BOTH
@pytest.mark.parametrize(
    ("options", "stop"),
    [
        ({"max_pattern_size": 5, "min_pattern_size": 2, "min_count": 3}, RepetitionStop(5, 3, 2)),
        ({"max_pattern_size": 5, "min_count": 3}, RepetitionStop(5, 3, 1)),
        ({"max_pattern_size": 5, "min_pattern_size": 0, "min_count": 3}, RepetitionStop(5, 3, 1)),
        ({"max_pattern_size": 256, "min_count": 16}, RepetitionStop(256, 16, 1)),
        ({"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0}, None),
        ({}, None),
        (None, None),
    ],
)
async def test_repetition_detection_of_vllm_reaches_the_engine(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    options: Any,
    stop: RepetitionStop | None,
) -> None:
    response = await client.post(path, json=body | {"repetition_detection": options})
    assert response.status_code == 200, response.text
    assert engine.requests[-1].sampling.repetition_stop == stop


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {"max_pattern_size": 5},
        {"max_pattern_size": 5, "min_count": 1},
        {"max_pattern_size": 5, "min_pattern_size": 6, "min_count": 2},
        {"min_pattern_size": 1, "min_count": 2},
        {"max_pattern_size": -1, "min_count": 2},
        {"max_pattern_size": 257, "min_count": 2},
        {"max_pattern_size": 256, "min_count": 17},
        {"max_pattern_size": True, "min_count": 2},
        True,
    ],
)
async def test_repetition_that_cannot_match_is_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], options: Any
) -> None:
    param, _ = await error_of(client, path, body | {"repetition_detection": options})
    assert param.startswith("repetition_detection")


@BOTH
async def test_two_kinds_of_repetition_are_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    both = {
        "repetition_stop": {"ngram": 2, "times": 2},
        "repetition_detection": {"max_pattern_size": 2, "min_count": 2},
    }
    assert (await error_of(client, path, body | both))[0] == "repetition_detection"


@BOTH
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_stop", {"ngram": 2, "times": 2}),
        ("repetition_detection", {"max_pattern_size": 2, "min_count": 2}),
        ("first_token_ids", [5]),
    ],
)
async def test_beams_end_by_themselves(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], name: str, value: Any
) -> None:
    param, message = await error_of(client, path, body | {name: value, "use_beam_search": True})
    assert (param, "use_beam_search" in message) == (name, True)


@BOTH
async def test_first_tokens_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    response = await client.post(path, json=body | {"first_token_ids": [65, 66, 65]})
    assert response.status_code == 200, response.text
    assert engine.requests[-1].sampling.first_token_ids == {65, 66}
    for ids in ([], [-1], [0x110000], [True], 5):
        param, _ = await error_of(client, path, body | {"first_token_ids": ids})
        assert param.startswith("first_token_ids")


async def test_healing_is_for_completions(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for value in (True, False, None):
        response = await client.post(TEXT[0], json=TEXT[1] | {"token_healing": value})
        assert response.status_code == 200, response.text
        assert engine.requests[-1].sampling.token_healing is bool(value)
    assert (await error_of(client, CHAT[0], CHAT[1] | {"token_healing": True}))[0] == "token_healing"


@pytest.mark.parametrize(
    "fields",
    [
        {"use_beam_search": True},
        {"allowed_token_ids": [5]},
        {"first_token_ids": [5]},
        {"bad_words": ["x"]},
        {"bad_words_ids": [[5]]},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"suffix": "x"},
    ],
)
async def test_what_healing_cannot_go_with(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    param, message = await error_of(client, TEXT[0], TEXT[1] | fields | {"token_healing": True})
    assert param == "token_healing"
    assert next(iter(fields)) in message
