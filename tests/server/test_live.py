"""A live server under hypercorn on loopback: official clients, curl, rude peers, many streams."""

import asyncio
import json
import math
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import LiveServer
from tests.server.h2_client import H2Client


@pytest.fixture
def sdk(live: LiveServer) -> Any:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def user(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


def num_running(live: LiveServer) -> int:
    load: dict[str, int] = live.get("/load").json()
    assert load["running"] == load["pages_used"]
    return load["server_load"]


# The official client


def test_sdk_chat(sdk: openai.OpenAI, live: LiveServer) -> None:
    answer = sdk.chat.completions.create(model="fake-model", messages=user("tokens=3"))
    assert answer.choices[0].message.content == "t0 t1 t2 "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 11
    assert answer._request_id


def test_sdk_log_probabilities(sdk: openai.OpenAI) -> None:
    fields: Any = {"model": "fake-model", "messages": user("say:né"), "logprobs": True, "top_logprobs": 2}
    told = sdk.chat.completions.create(**fields).choices[0].logprobs
    assert told is not None and told.content is not None
    assert b"".join(bytes(entry.bytes or ()) for entry in told.content) == "né".encode()
    assert [len(entry.top_logprobs) for entry in told.content] == [2, 2]
    with sdk.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0].logprobs
    assert final is not None and final.content == told.content
    text = sdk.completions.create(model="fake-model", prompt="say:né", logprobs=1).choices[0].logprobs
    assert text is not None and (text.tokens, text.text_offset) == (["n", "é"], [0, 1])


def test_sdk_stream(sdk: openai.OpenAI) -> None:
    chunks = list(
        sdk.chat.completions.create(
            model="fake-model",
            messages=user("tokens=5 delay=0.005"),
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "t0 t1 t2 t3 t4 "
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_sdk_stream_helper_with_several_choices(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(
        model="fake-model", messages=user("tokens=4 delay=0.003"), n=3, stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == ["t0 t1 t2 t3 "] * 3
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_sdk_completions_and_models(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="fake-model", prompt=["say:ab", "say:cd"], max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["ab", "cd"]
    text = "".join(
        chunk.choices[0].text
        for chunk in sdk.completions.create(model="fake-model", prompt='say:日本🎉\n"x\\', stream=True)
    )
    assert text == '日本🎉\n"x\\'
    assert [model.id for model in sdk.models.list()] == ["fake-model"]
    assert sdk.models.retrieve("fake-model").id == "fake-model"


def test_sdk_embeddings(sdk: openai.OpenAI) -> None:
    answer = sdk.embeddings.create(model="fake-model", input=["a", "b"], dimensions=4)
    assert [len(item.embedding) for item in answer.data] == [4, 4]
    assert answer.data[0].embedding[0] == pytest.approx(97 / math.hypot(97, 1, 2, 3), abs=1e-6)
    plain = sdk.embeddings.create(model="fake-model", input="a", encoding_format="float", dimensions=4)
    assert plain.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-6)
    assert answer.usage.prompt_tokens == 2


def test_sdk_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="fake-model", messages=user("x" * 5000))
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(model="other", messages=user("hi"))
    with pytest.raises(openai.APIError, match="Computing this request failed"):
        list(sdk.chat.completions.create(model="fake-model", messages=user("fail=1"), stream=True))
    with pytest.raises(openai.InternalServerError):
        sdk.chat.completions.create(model="fake-model", messages=user("fail=1"))


async def test_async_sdk_leaves_in_the_middle(live: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="fake-model", messages=user("tokens=4000 delay=0.01"), max_tokens=4000, stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        assert await asyncio.to_thread(num_running, live) == 1
        await stream.close()
        await asyncio.to_thread(live.wait_until_idle)


# curl


def curl(*arguments: str) -> str:
    """What curl prints."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    return subprocess.run(
        ["curl", "-sS", "-m", "20", *arguments], capture_output=True, text=True, check=True
    ).stdout


def test_curl_streams(live: LiveServer) -> None:
    body = json.dumps({"messages": user("tokens=2"), "stream": True})
    lines = curl("-N", f"{live.url}/v1/chat/completions", "-d", body).splitlines()
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line == "" or line.startswith("data: ") for line in lines)


@pytest.mark.parametrize(
    ("num_chars", "status", "code"),
    [
        (1_500_000, "400", "context_length_exceeded"),
        (3_000_000, "413", "request_too_large"),
    ],
)
def test_curl_asks_before_it_sends_a_long_body(
    live: LiveServer, tmp_path: Path, num_chars: int, status: str, code: str
) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"messages": user("x" * num_chars)}))
    answer = curl("-w", "%{http_code}", "-d", f"@{body}", f"{live.url}/v1/chat/completions")
    assert answer.endswith(status)
    assert code in answer


def test_http_2(live: LiveServer) -> None:
    with httpx.Client(http1=False, http2=True, verify=False) as client:
        assert client.get(f"{live.url}/health").http_version == "HTTP/2"
        body = {"messages": user("tokens=3 delay=0.001"), "stream": True}
        response = client.post(f"{live.url}/v1/chat/completions", json=body)
        assert response.text.endswith("data: [DONE]\n\n")
        assert client.post(f"{live.url}/v1/chat/completions", content=b"{").status_code == 400
        assert client.get(f"{live.url}/nothing").status_code == 404


# Rude peers


def connect(live: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=10)


def post(body: bytes, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length + body


def read_all(peer: socket.socket) -> bytes:
    received = b""
    while data := peer.recv(65536):
        received += data
    return received


@pytest.mark.parametrize("stream", [True, False])
def test_peer_that_leaves_is_not_computed_for(live: LiveServer, stream: bool) -> None:
    with connect(live) as peer:
        peer.sendall(post(json.dumps({"messages": user("hang"), "stream": stream}).encode()))
        deadline = time.monotonic() + 10
        while num_running(live) != 1:
            assert time.monotonic() < deadline, live.log
    live.wait_until_idle()


def test_peer_that_leaves_while_its_prompt_is_encoded(live: LiveServer) -> None:
    with connect(live) as peer:
        peer.sendall(post(json.dumps({"messages": user("slow template")}).encode()))
        live.wait_for("A slow template is rendered")
    live.wait_for(r"POST /v1/chat/completions 499")


def test_half_sent_body_ends_after_a_while(live: LiveServer) -> None:
    with connect(live) as peer:
        peer.sendall(post(b'{"messages": [', length=1000))
        answer = read_all(peer)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"timeout"' in answer
    assert live.get("/health").status_code == 200


@pytest.mark.parametrize("chunked", [True, False])
def test_long_body_is_answered_and_closed(live: LiveServer, chunked: bool) -> None:
    def pieces() -> Any:
        for _ in range(600):
            yield b" " * 10_000

    content = pieces() if chunked else b" " * 6_000_000
    with httpx.Client(verify=False) as client:
        response = client.post(f"{live.url}/v1/chat/completions", content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert client.get(f"{live.url}/health").status_code == 200


def test_long_body_nobody_reads_does_not_stall_the_connection(live: LiveServer) -> None:
    with httpx.Client(verify=False) as client:
        for _ in range(2):
            response = client.post(f"{live.url}/nothing", content=b" " * 1_900_000)
            assert response.status_code == 404
            assert client.get(f"{live.url}/health").status_code == 200


ENDLESS = {"messages": user("tokens=4000 size=5000"), "stream": True, "max_tokens": 4000}


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_reader_that_stops_is_given_up(live: LiveServer, version: bytes) -> None:
    name = b"reads-" + version
    with connect(live) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = b"HTTP/%b\r\nX-Request-Id: %b\r\n" % (version, name)
        peer.sendall(post(json.dumps(ENDLESS).encode()).replace(b"HTTP/1.1\r\n", head))
        live.wait_for(rf"{name.decode()} .* ended=slow_client")
    live.wait_until_idle()


@pytest.mark.parametrize("window", [0, 2**31 - 1], ids=["keeps its window shut", "reads nothing"])
async def test_reader_of_http2_that_stops_is_given_up(live: LiveServer, window: int) -> None:
    name = f"reads-2-{window}"
    client = await H2Client.connect(live.port, window)
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.frames.increment_flow_control_window(2**31 - 2**16)
    body = json.dumps(ENDLESS).encode()
    client.send("/v1/chat/completions", body, content_type="application/json", x_request_id=name)
    await asyncio.to_thread(live.wait_for, rf"{name} .* ended=slow_client")
    await client.close()
    await asyncio.to_thread(live.wait_until_idle)


def test_a_length_given_in_two_ways_is_refused_and_nothing_smuggled(live: LiveServer) -> None:
    lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(live) as peer:
        peer.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + lengths)
        peer.sendall(b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = read_all(peer)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"not both" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_target_may_be_a_whole_url(live: LiveServer) -> None:
    with connect(live) as peer:
        peer.sendall(b"GET http://x/version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert read_all(peer).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x01\x00\x00\x00\x00\x00\x00\xff" * 20,
    ],
)
def test_what_is_no_http_harms_nobody(live: LiveServer, data: bytes) -> None:
    with connect(live) as peer:
        peer.settimeout(3)
        try:
            peer.sendall(data)
            peer.recv(65536)
        except (ConnectionError, TimeoutError):
            pass
    assert live.get("/health").status_code == 200


# Many


async def test_many_streams_at_once(live: LiveServer) -> None:
    async def one(number: int) -> str:
        """A bare client: httpx would take most of the machine for itself."""
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        body = {"messages": user(f"tokens=20 delay=0.01 {number}"), "stream": True}
        writer.write(post(json.dumps(body).encode()))
        answer = await reader.readuntil(b"data: [DONE]")
        writer.close()
        return answer.decode()

    answers = await asyncio.gather(*(one(number) for number in range(200)))
    for answer in answers:
        chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == "".join(f"t{number} " for number in range(20))
    await asyncio.to_thread(live.wait_until_idle)


def test_keys_are_asked_for_and_never_logged(start: Callable[..., LiveServer]) -> None:
    live = start(MONOLOOP_API_KEY="secret-one,secret-two").ready()
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "bearer secret-one"}, 200),
        ({"x-api-key": "secret-two"}, 200),
    ):
        assert live.get("/v1/models", headers=headers).status_code == status
    assert live.get("/health").status_code == 200
    assert "secret" not in live.log
    assert "$MONOLOOP_API_KEY" in live.log
