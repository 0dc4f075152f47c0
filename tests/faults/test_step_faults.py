"""Faults inside a step: they end the requests that they hit, and the next request is answered as before."""

import logging
from collections.abc import Callable

import pytest
import torch

from engine import Engine
from engine.errors import EngineError, InvalidRequest, StepFailed
from engine.request import Grammar
from tests.engine.tiny_engine import answers, tiny_engine, tiny_request

YES_OR_NO = Grammar("choice", '["yes", "no"]')


def broken(*args: object, **options: object) -> None:
    """Take the place of a function and fail."""
    raise RuntimeError("broken on purpose")


class Panic(BaseException):
    """What a library in Rust raises."""


def panics(*args: object, **options: object) -> None:
    """Take the place of a function and fail as a library in Rust does."""
    raise Panic("broken on purpose")


async def ask(engine: Engine, **sampling: object) -> str:
    [answer] = await answers(engine, [tiny_request("hello", 8, **sampling)])
    return answer.text


@pytest.mark.parametrize("fault", [broken, panics])
@pytest.mark.parametrize(
    "place",
    [
        "engine.device.runner.build_batch",
        "engine.device.runner.ModelRunner._forward",
        "engine.device.sampler.EagerSampling.plain",
        "engine.device.runner.build_step_output",
        "engine.device.token_masks.TokenMasks.start",
    ],
)
async def test_the_requests_of_a_broken_step_end(
    place: str, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with tiny_engine() as engine:
        expected = await ask(engine)
        with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL + 1, "monoloop.engine"):
            patch.setattr(place, fault)
            with pytest.raises(StepFailed, match="Computing this request failed"):
                await ask(engine)
        assert await ask(engine) == expected
        engine.check_alive()


@pytest.mark.parametrize("fault", [broken, panics])
async def test_masks_that_cannot_be_computed_end_the_requests_that_need_them(
    fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with tiny_engine() as engine:
        expected = await ask(engine, grammar=YES_OR_NO)
        free = await ask(engine)
        with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL + 1, "monoloop.engine"):
            patch.setattr("engine.constraints.grammar.GrammarMatcher.fill_masks", fault)
            with pytest.raises(EngineError):
                await ask(engine, grammar=YES_OR_NO)
            assert await ask(engine) == free
        assert await ask(engine, grammar=YES_OR_NO) == expected


async def test_a_grammar_that_cannot_be_compiled_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with tiny_engine() as engine:
        with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL, "monoloop.engine"):
            patch.setattr("engine.constraints.grammar.compile_grammar", panics)
            with pytest.raises(InvalidRequest, match="the compiler failed on it"):
                await ask(engine, grammar=YES_OR_NO)
        assert await ask(engine, grammar=YES_OR_NO) in ("yes", "no")


async def test_text_that_cannot_be_delivered_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    async with tiny_engine() as engine:
        expected = await ask(engine)
        deliver, engine._delivery._on_text = engine._delivery._on_text, broken
        with caplog.at_level(logging.CRITICAL, "monoloop.engine"), pytest.raises(StepFailed, match="text"):
            await ask(engine)
        engine._delivery._on_text = deliver
        assert await ask(engine) == expected


async def test_nan_in_the_logits_ends_the_request_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tiny_engine() as engine:
        expected = await ask(engine)
        with monkeypatch.context() as patch:
            patch.setattr(
                "models.decoder.Decoder.logits",
                lambda self, hidden: torch.full((hidden.shape[0], self.spec.vocab_size), torch.nan),
            )
            with pytest.raises(StepFailed, match="no finite probabilities"):
                await ask(engine)
        assert engine.stats().corrupted_requests_total == 1
        assert await ask(engine) == expected
