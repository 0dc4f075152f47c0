"""The native routes of TGI and LightLLM over ASGI, with a FakeEngine; bodies as their clients send them.

Covers server/routes/native/convert.py.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from engine.outputs import OutputToken, TextDelta, TokenPiece
from server.routes.native.tokens import TokenTexts
from server.routes.table import REFUSED
from server.schema.errors import NativeError
from server.schema.generate_parameters import GenerateParameters
from server.schema.native import (
    GenerateRequest,
    LightllmEvent,
    LightllmResponse,
    TgiEvent,
    TgiResponse,
)
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine

# What huggingface_hub 2.4 sends for text_generation("tokens=3", max_new_tokens=20).
HUB_BODY = {
    "inputs": "tokens=3",
    "parameters": {
        "adapter_id": None,
        "best_of": None,
        "decoder_input_details": False,
        "details": False,
        "do_sample": None,
        "frequency_penalty": None,
        "grammar": None,
        "max_new_tokens": 20,
        "repetition_penalty": None,
        "return_full_text": False,
        "seed": None,
        "stop": [],
        "temperature": None,
        "top_k": None,
        "top_n_tokens": None,
        "top_p": None,
        "truncate": None,
        "typical_p": None,
        "watermark": False,
    },
    "stream": False,
}
# From the page of TGI's API, and from LightLLM's README.
CURL_BODY = {"inputs": "tokens=3", "parameters": {"max_new_tokens": 17, "frequency_penalty": 1}}


@pytest.fixture
async def lightllm(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that speaks LightLLM's API."""
    async with client_for(engine, generate_api="lightllm") as found:
        yield found


async def ask(client: httpx.AsyncClient, path: str = "/generate", **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


async def stream(client: httpx.AsyncClient, path: str = "/generate_stream", **body: Any) -> list[Any]:
    """The events of a streamed answer; checks their framing."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.removesuffix("\n\n").split("\n\n")
    assert all(frame.startswith("data:{") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data:")) for frame in frames]


# TGI


@pytest.mark.parametrize("body", [HUB_BODY, CURL_BODY, {"inputs": "tokens=3", "parameters": None}])
async def test_tgi_answer(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    answer = await ask(client, **body)
    TgiResponse.model_validate(answer)
    assert answer == {"generated_text": "t0 t1 t2 "}
    assert await ask(client, "/", **body) == [answer]


async def test_tgi_stream(client: httpx.AsyncClient) -> None:
    body = {"inputs": "tokens=3 delay=0.002", "parameters": {"return_full_text": True}}
    for events in (
        await stream(client, **body),
        await stream(client, "/", **body, stream=True),
        await stream(client, "/generate", **body, stream=True),
    ):
        for event in events:
            TgiEvent.model_validate(event)
        assert "".join(event["token"]["text"] for event in events) == "t0 t1 t2 "
        assert [event["generated_text"] for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1]["generated_text"] == "tokens=3 delay=0.002t0 t1 t2 "
        assert events[-1]["index"] == 3


async def test_tgi_defaults(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.model = replace(engine.model, generation_defaults={"temperature": 0.3, "top_p": 0.4})
    await ask(client, inputs="a")
    sampling = engine.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (100, 0.0, 1.0)
    await ask(client, inputs="a", parameters={"do_sample": True})
    assert engine.requests[-1].sampling.temperature == 1.0
    for name, value in (("temperature", 0.5), ("top_p", 0.9), ("top_k", 5)):
        await ask(client, inputs="a", parameters={name: value})
        assert engine.requests[-1].sampling.temperature == (value if name == "temperature" else 1.0), name
        assert getattr(engine.requests[-1].sampling, name) == value
    await ask(client, inputs="a", parameters={"temperature": 0, "top_k": 5})
    assert engine.requests[-1].sampling.temperature == 0.0


async def test_parameters_act(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(
        client,
        inputs="bos and more",
        parameters={
            "max_new_tokens": 9,
            "min_new_tokens": 2,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.1,
            "presence_penalty": 0.2,
            "seed": 2**64 - 1,
            "stop": ["x", "y"],
            "truncate": 4,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "logit_bias": {"5": 1},
            "best_of": 1,
            "typical_p": 1.0,
        },
    )
    request = engine.requests[-1]
    assert "".join(map(chr, request.prompt_token_ids)) == "more"
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (9, 2, -1)
    assert (sampling.repetition_penalty, sampling.frequency_penalty) == (1.2, 0.1)
    assert (sampling.presence_penalty, sampling.stop) == (0.2, ("x", "y"))
    assert (sampling.ignore_eos, sampling.skip_special_tokens) == (True, False)
    assert sampling.logit_bias == ((5, 1.0),)
    await ask(client, inputs="bos", parameters={"add_special_tokens": False})
    assert len(engine.requests[-1].prompt_token_ids) == 3


async def test_a_stop_sequence_stays_in_the_text(
    client: httpx.AsyncClient, lightllm: httpx.AsyncClient
) -> None:
    answer = await ask(client, inputs="tokens=5", parameters={"stop": ["t2"]})
    assert answer["generated_text"] == "t0 t1 t2"
    answer = await ask(lightllm, inputs="tokens=5", parameters={"stop_sequences": "t2"})
    assert answer["generated_text"] == ["t0 t1 t2"]


# LightLLM


async def test_lightllm_answer(lightllm: httpx.AsyncClient) -> None:
    for path in ("/generate", "/"):
        answer = await ask(lightllm, path, **CURL_BODY)
        LightllmResponse.model_validate(answer)
        assert answer == {
            "generated_text": ["t0 t1 t2 "],
            "count_output_tokens": 3,
            "finish_reason": "stop",
            "prompt_tokens": 8,
        }


async def test_lightllm_answers_with_several_texts(lightllm: httpx.AsyncClient) -> None:
    answer = await ask(lightllm, inputs="tokens=5", parameters={"n": 2, "best_of": 2, "max_new_tokens": 2})
    assert answer == {
        "generated_text": ["t0 t1 ", "t0 t1 "],
        "count_output_tokens": [2, 2],
        "finish_reason": ["length", "length"],
        "prompt_tokens": 8,
    }


async def test_lightllm_stream(lightllm: httpx.AsyncClient) -> None:
    events = await stream(lightllm, inputs="tokens=3 delay=0.002", parameters={"return_full_text": True})
    for event in events:
        LightllmEvent.model_validate(event)
    text = "".join(event["token"]["text"] for event in events)
    assert text == "tokens=3 delay=0.002t0 t1 t2 "
    assert [event["finished"] for event in events] == [False] * (len(events) - 1) + [True]
    assert [event["finish_reason"] for event in events][-2:] == [None, "stop"]
    assert events[-1]["token"]["count_output_tokens"] == 3
    assert events[-1]["token"]["prompt_tokens"] == 20


async def test_lightllm_defaults(lightllm: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(lightllm, inputs="a", parameters={"temperature": 0.7})
    assert engine.requests[-1].sampling.temperature == 0.0, "sampling is asked for by do_sample alone"
    assert engine.requests[-1].sampling.max_tokens == 16
    await ask(lightllm, inputs="a", parameters={"temperature": 0.7, "do_sample": True})
    assert engine.requests[-1].sampling.temperature == 0.7
    engine.model = replace(engine.model, generation_defaults={"temperature": 0.3, "top_p": 0.4})
    await ask(lightllm, inputs="a")
    assert engine.requests[-1].sampling.temperature == 0.3
    assert engine.requests[-1].sampling.top_p == 0.4
    await ask(lightllm, inputs="a", parameters={"do_sample": False})
    assert engine.requests[-1].sampling.temperature == 0.0


# Both


@pytest.mark.parametrize("text", ['"\\\n\t', "日本🎉", "data:-1"])
async def test_text_survives(client: httpx.AsyncClient, lightllm: httpx.AsyncClient, text: str) -> None:
    for either in (client, lightllm):
        events = await stream(either, inputs=f"say:{text}", parameters={"max_new_tokens": 50})
        assert "".join(event["token"]["text"] for event in events) == text


def with_parameters(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "a", "parameters": parameters}


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "inputs"),
    ({"inputs": 5}, "inputs"),
    ({"inputs": ["a"]}, "inputs"),
    ({"inputs": ""}, "no tokens"),
    ({"inputs": "a\0"}, "inputs"),
    ({"inputs": "x" * 4096}, "maximum context length is 4096"),
    ({"inputs": "x" * 9000}, "maximum context length"),
    ({"inputs": "a", "parameters": 5}, "parameters"),
    ({"inputs": "a", "stream": 5}, "stream"),
    ({"inputs": "a", "max_new_tokens": 5}, "max_new_tokens is not supported: it belongs in parameters"),
    ({"inputs": "a", "temperature": 0.5}, "it belongs in parameters"),
    ({"prompt": "a"}, "send inputs"),
    ({"inputs": "a", "multimodal_params": {"images": [{}]}}, "multimodal_params"),
    (with_parameters(max_new_tokens=0), "parameters.max_new_tokens"),
    (with_parameters(max_new_tokens=4096), "max_new_tokens"),
    (with_parameters(max_new_tokens=True), "parameters.max_new_tokens"),
    (with_parameters(min_new_tokens=5, max_new_tokens=4), "min_new_tokens"),
    (with_parameters(min_new_tokens=200), "min_new_tokens"),
    (with_parameters(temperature=-1), "parameters.temperature"),
    (with_parameters(top_p=0), "parameters.top_p"),
    (with_parameters(seed=2**64), "parameters.seed"),
    (with_parameters(stop=[""]), "parameters.stop"),
    (with_parameters(stop=["a\0"]), "parameters.stop"),
    (with_parameters(stop_sequences=[[1, 2]]), "parameters.stop_sequences"),
    (with_parameters(stop=["a"], stop_sequences=["b"]), "not both"),
    (with_parameters(truncate=0), "parameters.truncate"),
    (with_parameters(do_sample="yes"), "parameters.do_sample"),
    (with_parameters(stop_token_ids=[0x110000]), "stop_token_ids"),
    (with_parameters(return_details=True), "return_details is not supported"),
    (with_parameters(best_of=2), "parameters.best_of"),
    (with_parameters(best_of=0), "parameters.best_of"),
    (with_parameters(best_of=21, do_sample=True), "parameters.best_of"),
    (with_parameters(decoder_input_details=True), "parameters.decoder_input_details"),
    (with_parameters(top_n_tokens=5), "parameters.top_n_tokens"),
    (with_parameters(details=True, top_n_tokens=21), "parameters.top_n_tokens"),
    (with_parameters(typical_p=0.9), "typical_p is not supported"),
    (with_parameters(watermark=True), "watermark is not supported"),
    (with_parameters(adapter_id="x"), "adapter_id is not supported"),
    (with_parameters(guided_regex="a"), "guided_regex is not supported"),
    (with_parameters(input_penalty=True), "input_penalty is not supported"),
    (with_parameters(exponential_decay_length_penalty=[1, 1.1]), "exponential_decay_length_penalty"),
    (with_parameters(max_tokens=5), "use max_new_tokens"),
    (with_parameters(prompt="x"), "send inputs"),
]


@pytest.mark.parametrize(
    ("body", "words"), BAD, ids=[f"{n}-{words[:20]}" for n, (_, words) in enumerate(BAD)]
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_bad_input_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], words: str, path: str
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text[:500]
    error = NativeError.model_validate(response.json())
    assert error.error_type == "validation"
    assert words in error.error == error.message
    assert len(response.content) < 2000
    assert not engine.requests


async def test_several_texts_have_no_place_everywhere(
    client: httpx.AsyncClient, lightllm: httpx.AsyncClient
) -> None:
    body = {"inputs": "a", "parameters": {"n": 2}}
    for response in (
        await client.post("/generate", json=body),
        await lightllm.post("/generate_stream", json=body),
    ):
        assert response.status_code == 400
        assert "parameters.n must be 1" in response.json()["error"]


async def test_neutral_values_are_accepted(client: httpx.AsyncClient) -> None:
    await ask(
        client,
        inputs="a",
        multimodal_params={"images": []},
        parameters={
            "exponential_decay_length_penalty": [1, 1.0],
            "best_of": 1,
            "top_n_tokens": 0,
            "print_eos_token": False,
            "add_spaces_between_special_tokens": True,
            "group_request_id": 5,
        },
    )


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    response = await client.post("/generate", json={"inputs": "a", "model": "other"})
    assert response.status_code == 404


async def test_states_of_the_server_have_their_names(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    async def kind() -> tuple[int, str]:
        response = await client.post("/generate", json={"inputs": "fail=1"})
        return response.status_code, NativeError.model_validate(response.json()).error_type

    assert await kind() == (500, "generation")
    engine.is_full = True
    assert await kind() == (429, "overloaded")
    engine.is_draining = True
    assert await kind() == (503, "overloaded")


async def test_a_fault_in_the_stream_is_its_last_event(
    client: httpx.AsyncClient, lightllm: httpx.AsyncClient
) -> None:
    for either in (client, lightllm):
        events = await stream(either, inputs="tokens=5 fail=2 delay=0.002")
        assert events[-1] == {
            "error": "Computing this request failed.",
            "error_type": "generation",
            "message": "Computing this request failed.",
        }


async def test_keys_are_asked_for(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=("k",)) as client:
        for path in ("/", "/generate", "/generate_stream"):
            response = await client.post(path, json=CURL_BODY)
            assert response.status_code == 401
            NativeError.model_validate(response.json())


def test_fields_are_declared_or_refused() -> None:
    assert not set(REFUSED[GenerateRequest]) & set(GenerateRequest.model_fields)
    both = set(REFUSED[GenerateParameters]) & set(GenerateParameters.model_fields)
    assert both == {"model", "stream", "stream_options", "min_tokens"}, "inherited, and not for here"


async def test_details_tell_every_token(client: httpx.AsyncClient) -> None:
    parameters = {"details": True, "decoder_input_details": True, "top_n_tokens": 2, "seed": 7}
    response = await client.post("/generate", json={"inputs": "say:é!", "parameters": parameters})
    body = response.json()
    TgiResponse.model_validate(body)
    details = body["details"]
    assert body["generated_text"] == "é!"
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", 2, 7)
    assert details["tokens"] == [
        {"id": 233, "text": "é", "logprob": 0.0, "special": False},
        {"id": 33, "text": "!", "logprob": -0.125, "special": False},
    ]
    assert [token["text"] for token in details["prefill"]] == list("say:é!")
    assert [token["logprob"] for token in details["prefill"][:2]] == [None, -0.25]
    assert [len(tokens) for tokens in details["top_tokens"]] == [2, 2]
    response = await client.post("/generate", json={"inputs": "say:é!", "parameters": {"details": True}})
    assert "top_tokens" not in response.json()["details"]
    assert response.json()["details"]["prefill"] == []


async def test_streamed_details_have_an_event_for_each_token(client: httpx.AsyncClient) -> None:
    parameters = {"details": True, "top_n_tokens": 1, "stop": ["d"], "return_full_text": True}
    response = await client.post("/generate_stream", json={"inputs": "say:abcdef", "parameters": parameters})
    events = [json.loads(line.removeprefix("data:")) for line in response.text.split("\n\n")[:-1]]
    for event in events:
        TgiEvent.model_validate(event)
    assert [event["token"]["id"] for event in events] == [97, 98, 99, 100]
    assert [event["token"]["text"] for event in events] == ["a", "b", "c", "d"]
    assert [event["index"] for event in events] == [1, 2, 3, 4]
    assert [event["token"]["logprob"] for event in events] == [0.0, -0.125, -0.25, -0.375]
    assert all(len(event["top_tokens"]) == 1 for event in events)
    assert [event["generated_text"] for event in events[:-1]] == [None] * 3
    assert events[-1]["generated_text"] == "say:abcdefabcd"
    assert events[-1]["details"] == {
        "finish_reason": "stop_sequence", "generated_tokens": 4, "seed": None, "input_length": 10,
    }  # fmt: skip


async def test_details_are_tgis(lightllm: httpx.AsyncClient, client: httpx.AsyncClient) -> None:
    response = await lightllm.post("/generate", json={"inputs": "a", "parameters": {"details": True}})
    assert response.status_code == 400 and "details is not supported" in response.text
    parameters = {"best_of": 2, "n": 3}
    response = await lightllm.post("/generate", json={"inputs": "a", "parameters": parameters})
    assert response.status_code == 400 and "parameters.best_of" in response.text
    parameters = {"best_of": 2, "do_sample": True}
    for either in (client, lightllm):
        response = await either.post("/generate_stream", json={"inputs": "a", "parameters": parameters})
        assert response.status_code == 400 and "must be 1" in response.text
    parameters = {"details": True, "decoder_input_details": True}
    response = await client.post("/generate_stream", json={"inputs": "a", "parameters": parameters})
    assert response.status_code == 400 and "decoder_input_details" in response.text


async def test_the_best_of_several_texts(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """The fake model finds a text the less likely the larger its seed modulo 7 is."""
    parameters = {"best_of": 3, "do_sample": True, "seed": 5, "max_new_tokens": 2, "return_full_text": True}
    assert await ask(client, inputs="say:ab", parameters=parameters) == {"generated_text": "say:abab"}
    assert [request.sampling.seed for request in engine.requests] == [5, 6, 7]
    parameters |= {"details": True, "decoder_input_details": True, "top_n_tokens": 1}
    answer = await ask(client, inputs="say:ab", parameters=parameters)
    TgiResponse.model_validate(answer)
    details = answer["details"]
    assert (details["seed"], [other["seed"] for other in details["best_of_sequences"]]) == (7, [5, 6])
    for other in details["best_of_sequences"]:
        assert other["generated_text"] == "say:abab"
        assert other["tokens"][0]["logprob"] < details["tokens"][0]["logprob"]
        assert other["prefill"] == details["prefill"] != []
        assert len(other["top_tokens"]) == other["generated_tokens"] == 2
    answer = await ask(client, inputs="say:a", parameters={"best_of": 1, "details": True})
    assert "best_of_sequences" not in answer["details"]


async def test_best_of_is_the_number_of_texts_in_lightllm(lightllm: httpx.AsyncClient) -> None:
    for parameters in ({"best_of": 2}, {"n": 2}, {"n": 2, "best_of": 2}):
        answer = await ask(lightllm, inputs="say:a", parameters=parameters | {"do_sample": True})
        assert answer["generated_text"] == ["a", "a"]


async def test_lightllm_tells_its_tokens(lightllm: httpx.AsyncClient) -> None:
    parameters = {"return_details": True, "stop_sequences": ["c"], "return_full_text": True}
    answer = await ask(lightllm, inputs="say:aécd", parameters=parameters)
    LightllmResponse.model_validate(answer)
    expected = [
        {
            "count_output_tokens": number, "id": ord(text), "text": text, "logprob": (1 - number) / 8,
            "special": False, "prompt_tokens": 8,
        }
        for number, text in enumerate("aéc", 1)
    ]  # fmt: skip
    assert answer["tokens"] == expected
    assert (answer["generated_text"], answer["count_output_tokens"]) == (["say:aécdaéc"], 3)
    two = await ask(lightllm, inputs="say:aécd", parameters=parameters | {"n": 2})
    LightllmResponse.model_validate(two)
    assert two["tokens"] == [expected, expected]
    events = await stream(lightllm, inputs="say:aécd", parameters=parameters)
    for event in events:
        LightllmEvent.model_validate(event)
    expected[0]["text"] = "say:aécda"
    assert [event["token"] for event in events] == expected
    assert [event["finished"] for event in events] == [False, False, True]
    assert events[-1]["finish_reason"] == "stop"
    assert "tokens" not in await ask(lightllm, inputs="a")


def test_text_waits_for_its_tokens() -> None:
    """However deltas cut it; tokens that are not shown have none."""
    said = [("h", True), ("", False), ("ey", True), ("!", True)]
    tokens, offset = [], 0
    for number, (text, is_shown) in enumerate(said):
        tokens.append(OutputToken(TokenPiece(number, text.encode(), False), offset, -1.0, (), is_shown))
        offset += len(text)
    texts = TokenTexts()
    told = texts.take(TextDelta("h", 1))
    assert (told, texts.waiting) == ([], "h")
    told = texts.take(TextDelta("e", 1, tokens=tuple(tokens[:1])))
    assert told == [(tokens[0], "he")], "its text is what came before the next token"
    told = TokenTexts().take(TextDelta("hey!", 4, tokens=tuple(tokens)))
    assert told == [(tokens[0], "h"), (tokens[1], None), (tokens[2], "ey"), (tokens[3], "!")]
