"""The pages at / and /docs: their files are served and load nothing from elsewhere; only GET needs no key."""

import re

import httpx
import pytest

from server.routes.page import PAGES, file_paths, web_files
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine

HTML = {"accept": "text/html,application/xhtml+xml"}
TEXTS = {name: file.body.decode() for name, file in web_files().items()}
PATHS = PAGES | file_paths()


async def test_people_get_a_page_and_probes_a_line(client: httpx.AsyncClient) -> None:
    page = await client.get("/", headers=HTML)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for accept in ("*/*", "application/json"):
        line = await client.get("/", headers={"accept": accept})
        assert (line.status_code, line.text.count("\n")) == (200, 1)
        assert line.headers["content-type"].startswith("text/plain")
        assert line.headers["vary"] == page.headers["vary"] == "Accept"
    assert (await client.head("/")).status_code == 200
    assert (await client.post("/", json={"inputs": "tokens=1"})).json() == [{"generated_text": "t0 "}]


async def test_only_reading_is_open(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=("k",)) as client:
        for path in PATHS:
            assert (await client.get(path, headers=HTML)).status_code == 200
        assert (await client.post("/", json={"inputs": "tokens=1"})).status_code == 401
        for path in ("/live_stats", "/openapi.json"):
            assert (await client.get(path)).status_code == 401
    assert not engine.requests


async def test_the_pages_are_there_while_the_model_loads() -> None:
    async with client_for(None) as client:
        for path in ("/", "/docs", "/openapi.json"):
            assert (await client.get(path, headers=HTML)).status_code == 200


async def test_docs_with_a_last_slash_lead_to_where_its_files_are_found(client: httpx.AsyncClient) -> None:
    response = await client.get("/docs/")
    assert (response.status_code, response.headers["location"]) == (307, "../docs")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "nothing.js",
        "docs.html",
        "page.html",
        "../app.py",
        "..%2fapp.py",
        "%2e%2e/app.py",
        "..\\app.py",
        "/etc/passwd",
        "page.js/",
    ],
)
async def test_nothing_else_can_be_reached(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(f"/web/{path}")
    if path == "page.js/":  # the last slash of a path is not looked at
        assert response.content == web_files()["page.js"].body
    else:
        assert response.status_code == 404, response.text[:200]


async def test_files_have_strict_headers_and_are_sent_once(client: httpx.AsyncClient) -> None:
    for path in PATHS:
        response = await client.get(path, headers=HTML)
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
        again = await client.get(
            path, headers={**HTML, "if-none-match": f'"x", W/{response.headers["etag"]}'}
        )
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == response.headers["etag"]


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_loads_nothing_from_elsewhere_and_makes_no_markup_of_text(name: str) -> None:
    text = TEXTS[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\(", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text
    )
    if not name.endswith(".html"):
        return
    assert not re.search(r"\son\w+\s*=\s*[\"']|\sstyle\s*=|<style|<script>", text), (
        "inline handlers or styles"
    )


def test_what_the_page_loads_is_there() -> None:
    loaded = []
    for name, text in TEXTS.items():
        loaded += re.findall(r'(?:src|href)="web/([^"]+)"', text) if name.endswith(".html") else []
    assert len(loaded) > 4
    for name, text in TEXTS.items():
        loaded += re.findall(r'from "\./([^"]+)"', text) if name.endswith(".js") else []
    assert set(loaded) | {"page.html", "docs.html"} == set(TEXTS), (
        "files that are missing, or that nothing loads"
    )


@pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith((".js", ".css"))])
def test_a_file_is_short_enough_to_read(name: str) -> None:
    assert TEXTS[name].count("\n") <= 250
