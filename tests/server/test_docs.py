"""The page about the API: whole, offline, and harmless."""

import re

import httpx

from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine


async def test_the_page_needs_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    response = await client.get("/docs")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://|//\w|<link|<img|@import|url\(", response.text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", response.text)
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert (await client.get("/openapi.json")).status_code == 200


async def test_the_page_is_open_and_what_it_shows_is_not(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=("k",)) as client:
        assert (await client.get("/docs")).status_code == 200
        assert (await client.get("/openapi.json")).status_code == 401
        headers = {"authorization": "Bearer k"}
        assert (await client.get("/openapi.json", headers=headers)).status_code == 200


async def test_the_page_is_there_while_the_model_loads() -> None:
    async with client_for(None) as client:
        assert (await client.get("/docs")).status_code == 200
        assert (await client.get("/openapi.json")).status_code == 200
