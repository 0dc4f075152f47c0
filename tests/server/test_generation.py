"""Fields that only chat and completions have reach the engine, and are checked on the way."""

from typing import Any

import httpx
import pytest

from engine.request import RepetitionStop
from tests.server.fake_engine import FakeEngine
from tests.server.test_names import BOTH, error_of


@BOTH
async def test_circles_are_the_engines_matter(
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
async def test_circles_that_cannot_be(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], options: Any
) -> None:
    param, _ = await error_of(client, path, body | {"repetition_stop": options})
    assert param.startswith("repetition_stop")


@BOTH
@pytest.mark.parametrize(("name", "value"), [("repetition_stop", {"ngram": 2, "times": 2})])
async def test_beams_end_by_themselves(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], name: str, value: Any
) -> None:
    param, message = await error_of(client, path, body | {name: value, "use_beam_search": True})
    assert (param, "use_beam_search" in message) == (name, True)
