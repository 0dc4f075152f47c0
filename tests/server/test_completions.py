"""POST /v1/completions over ASGI, with a FakeEngine."""

import asyncio
from typing import Any

import httpx
import pytest

from engine.config import EngineConfig
from engine.text.infill import InfillTokens
from server.convert import REQUESTS_PER_TURN, make_requests
from server.limits import Limits
from server.schema.completions import CompletionRequest, CompletionResponse
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine


def ids(text: str) -> list[int]:
    return [ord(char) for char in text]


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    CompletionResponse.model_validate(response.json())
    answer: dict[str, Any] = response.json()
    return answer


async def test_answer_has_the_shape_of_the_api(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await complete(client, prompt="tokens=20")
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"].startswith("t0 t1 ")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16, "the API's default"


@pytest.mark.parametrize(
    "prompt",
    [
        ["say:ab", "say:cd"],
        [ids("say:ab"), ids("say:cd")],
    ],
)
async def test_lists_of_prompts_are_answered_in_order(client: httpx.AsyncClient, prompt: Any) -> None:
    answer = await complete(client, prompt=prompt, n=2)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "ab"), (1, "ab"), (2, "cd"), (3, "cd"),
    ]  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == 12, "each prompt counts once"
    assert answer["usage"]["completion_tokens"] == 8


async def test_lists_of_prompts_are_encoded_together(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    prompts = [f"say:{number}" for number in range(20)]
    answer = await complete(client, prompt=prompts, n=2)
    assert [choice["text"] for choice in answer["choices"]][::2] == [str(n) for n in range(20)]
    assert engine.tokenizer.num_encodes == 1


async def test_what_all_prompts_have_in_common_is_made_once(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """A big field times many prompts would hold up everybody."""
    await complete(
        client,
        prompt=["say:a", "say:bc"],
        n=2,
        seed=1,
        logit_bias={str(i): 1 for i in range(300)},
        allowed_token_ids=[*range(5000)],
        bad_words_ids=[[1, 2], [3]],
        stop_token_ids=[7],
        structured_outputs={"json": {"type": "object"}},
    )
    first, *others = (request.sampling for request in engine.requests)
    assert [sampling.seed for sampling in (first, *others)] == [1, 2, 1, 2]
    for name in ("logit_bias", "allowed_token_ids", "bad_words_ids", "stop_token_ids", "grammar"):
        assert getattr(first, name), name
        assert all(getattr(other, name) is getattr(first, name) for other in others), name


async def test_a_thousand_prompts_let_others_run() -> None:
    limits = Limits(4096, 1000, 64, 2000, {}, True)
    wire = CompletionRequest(prompt=["a"] * 500, n=2)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    requests = await make_requests(
        wire, [[1]] * 500, "cmpl-1", limits, default_max_tokens=16, prompt_param="prompt"
    )
    running.cancel()
    assert len(requests) == 1000
    assert turns >= 1000 // REQUESTS_PER_TURN - 1
    assert len({id(request.sampling) for request in requests}) == 1, "nothing in them differs"


async def test_each_prompt_leaves_its_own_room(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, prompt=["say:a", "say:bc"], max_tokens=3)
    await client.post("/v1/completions", json={"prompt": ["a" * 4090, "b"]})
    assert [request.sampling.max_tokens for request in engine.requests] == [3, 3, 6, 16]


async def test_token_ids_are_taken_as_they_are(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, prompt=ids("bos"))
    await complete(client, prompt="bos")
    await complete(client, prompt="bos", add_special_tokens=False)
    assert [request.prompt_token_ids for request in engine.requests] == [
        tuple(ids("bos")),
        (2, *ids("bos")),
        tuple(ids("bos")),
    ]


async def test_default_length_is_cut_to_the_context(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, prompt="x" * 4090)
    assert engine.requests[0].sampling.max_tokens == 6


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ("", "prompt"),
        ([[]], "prompt"),
        ([True], "prompt"),
        ([1.0], "prompt"),
        ([1, "a"], "prompt"),
        (["a", 1], "prompt"),
        ([[1], "a"], "prompt"),
        ([[1, True]], "prompt"),
        ([-1], "prompt"),
        ([0x110000], "prompt"),
        ([2**70], "prompt"),
        ({"a": 1}, "prompt"),
        (["a"] * 1025, "prompt"),
        (5, "prompt"),
        ("a\x00b", "prompt"),
    ],
)
async def test_bad_prompts_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, param: str
) -> None:
    response = await client.post("/v1/completions", json={"prompt": prompt})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not engine.requests


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        ("top_logprobs", 1),
        ("messages", []),
        ("tools", [{}]),
        ("tool_choice", "required"),
        ("chat_template_kwargs", {"a": 1}),
        ("reasoning_effort", "high"),
        ("continue_final_message", True),
    ],
)
async def test_fields_that_are_not_built_are_refused(
    client: httpx.AsyncClient, name: str, value: Any
) -> None:
    response = await client.post("/v1/completions", json={"prompt": "a", name: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_a_refused_field_comes_before_what_the_schema_finds(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/v1/completions", json={"prompt": "a", "chat_template": "b", "max_tokens": -1}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")


@pytest.mark.parametrize(("n", "prompts", "param"), [(1, 6, "prompt"), (3, 2, "n")])
async def test_what_no_queue_could_take_is_no_matter_of_coming_back(n: int, prompts: int, param: str) -> None:
    engine = FakeEngine(EngineConfig(max_num_seqs=3, max_waiting=2))
    async with client_for(engine) as client:
        response = await client.post("/v1/completions", json={"prompt": ["a"] * prompts, "n": n})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert "this server queues at most 5" in error["message"]
        response = await client.post("/v1/completions", json={"prompt": ["a"] * 5})
        assert response.status_code == 200


async def test_all_or_nothing_is_submitted(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    submit, count = engine.submit, 0

    def submit_two(request: Any) -> Any:
        nonlocal count
        count += 1
        engine.is_full = count > 2
        return submit(request)

    engine.submit = submit_two  # type: ignore[method-assign]
    response = await client.post("/v1/completions", json={"prompt": ["hang", "hang", "hang"]})
    assert response.status_code == 429
    assert not engine.live
    assert len(engine.aborted) == 2


async def test_which_tokens_may_appear(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(
        client, prompt="a", allowed_token_ids=[1, 2], bad_words=["x y"], bad_words_ids=[[1], [2, 3]]
    )
    sampling = engine.requests[0].sampling
    assert sampling.allowed_token_ids == {1, 2}
    assert (sampling.bad_words, sampling.bad_words_ids) == (("x y",), ((1,), (2, 3)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [0x110000]),
        ("bad_words", [""]),
        ("bad_words", ["a\0"]),
        ("bad_words", ["a"] * 129),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", [[1, -1]]),
    ],
)
async def test_tokens_that_cannot_be_meant_are_refused(
    client: httpx.AsyncClient, field: str, value: Any
) -> None:
    response = await client.post("/v1/completions", json={"prompt": "a", field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


async def test_a_suffix_makes_a_hole_to_fill(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.tokenizer.infill = InfillTokens(1, 2, 3)
    await complete(client, prompt="ab", suffix="z")
    await complete(client, prompt=ids("c"), suffix="z")
    assert [request.prompt_token_ids for request in engine.requests] == [
        (1, *ids("ab"), 2, *ids("z"), 3),
        (1, *ids("c"), 2, *ids("z"), 3),
    ]


@pytest.mark.parametrize(
    ("fields", "param"), [({"suffix": "z", "echo": True}, "echo"), ({"suffix": "z\0"}, "suffix")]
)
async def test_a_suffix_that_cannot_be_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/completions", json={"prompt": "a", "suffix": "z"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix"), "no such tokens"
    engine.tokenizer.infill = InfillTokens(1, 2, 3)
    response = await client.post("/v1/completions", json={"prompt": "a", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
