"""Requests with equal parameters are prepared once, and contradictory parameters refused."""

import asyncio

import pytest

from engine.constraints.prepare import REQUESTS_PER_TURN
from engine.errors import InvalidRequest
from tests.engine.tiny_engine import tiny_engine, tiny_request

A, B, C = 65, 66, 67


async def test_requests_with_equal_parameters_are_prepared_once(monkeypatch):
    """A thousand prompts of one client do not have its words spelled a thousand times."""
    async with tiny_engine() as engine:
        spelled: list[str] = []

        async def encode(texts: list[str], **options: bool) -> list[list[int]]:
            spelled.extend(texts)
            return [list(text.encode()) for text in texts]

        monkeypatch.setattr(engine.tokenizer, "encode_batch", encode)
        fields = {"bad_words": ("null",), "bad_words_ids": ((A, B),), "first_token_ids": frozenset({A, B})}
        requests = [tiny_request(prompt, seed=seed, **fields) for prompt in "ab" for seed in (1, 2)]
        first, *others = await engine.prepare([*requests, tiny_request("c", bad_words=("other",))])
        last = others.pop()
        assert spelled == ["null", " null", "other", " other"]
        for request in others:
            assert request.sampling.bad_words_ids is first.sampling.bad_words_ids
            assert all(
                mine is theirs for mine, theirs in zip(request.constraints, first.constraints, strict=True)
            )
        assert last.sampling.bad_words_ids != first.sampling.bad_words_ids


async def test_preparing_a_thousand_requests_yields_to_the_loop():
    async with tiny_engine() as engine:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        running = asyncio.create_task(other())
        requests = [tiny_request("a")] * 1000
        prepared = await engine.prepare(requests)
        running.cancel()
        assert turns >= 1000 // REQUESTS_PER_TURN - 1
        assert all(mine is theirs for mine, theirs in zip(prepared, requests, strict=True))


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words_ids": ((A,), (B,))},
        {"bad_words_ids": ((A,),), "stop_token_ids": frozenset((B,)), "min_tokens": 1},
        {"first_token_ids": frozenset((C,))},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_parameters_that_allow_no_token_are_refused(fields):
    async with tiny_engine() as engine:
        request = tiny_request("a", allowed_token_ids=frozenset((A, B)), **fields)
        with pytest.raises(InvalidRequest, match="_token_ids contains no token"):
            await engine.prepare([request])
