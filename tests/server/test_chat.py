"""POST /v1/chat/completions over ASGI, with a FakeEngine.

Covers server/prompt.py.
"""

from typing import Any

import httpx
import pytest

from server.schema.chat import ChatResponse
from tests.server.conftest import client_for
from tests.server.fake_engine import MODEL_NAME, FakeEngine


def body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


async def test_answer_has_the_shape_of_the_api(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=body("tokens=3"))
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    ChatResponse.model_validate(answer)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL_NAME
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "t0 t1 t2 ", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 3,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_length_is_a_finish_reason(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=body("tokens=9", max_tokens=2))
    choice = response.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("t0 t1 ", "length")


async def test_n_answers_share_the_prompt_and_shift_the_seed(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await client.post("/v1/chat/completions", json=body("tokens=2", n=3, seed=2**63 - 1))
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["usage"]["completion_tokens"] == 6
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds == [2**63 - 1, -(2**63), -(2**63) + 1], "seeds stay 64-bit numbers"


async def test_content_parts_are_joined_and_roles_mapped(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    custom = {"id": "c2", "type": "custom", "custom": {"name": "g", "input": "x"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}, "b"]},
        {"role": "assistant", "content": None, "tool_calls": [call, custom]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "reasoning": "because"},
    ]
    response = await client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200
    rendered, options = engine.tokenizer.chats[-1]
    assert rendered[0] == {"role": "system", "content": "be brief"}
    assert rendered[1] == {"role": "user", "content": "a\nb"}
    assert rendered[2]["content"] == ""
    functions = [call["function"] for call in rendered[2]["tool_calls"]]
    assert functions == [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"input": "x"}}]
    assert rendered[3]["tool_call_id"] == "c1"
    assert rendered[4]["reasoning_content"] == "because"
    assert options["add_generation_prompt"] is True


async def test_developer_stays_if_the_template_knows_it(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.tokenizer.chat_template = "{% if role == 'developer' %}"
    await client.post("/v1/chat/completions", json={"messages": [{"role": "developer", "content": "x"}]})
    assert engine.tokenizer.chats[-1][0][0]["role"] == "developer"


async def test_template_options_reach_the_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    request = body(
        chat_template_kwargs={"style": "short"}, reasoning_effort="none", documents=[{"title": "t"}],
        continue_final_message=True, add_generation_prompt=False,
    )  # fmt: skip
    assert (await client.post("/v1/chat/completions", json=request)).status_code == 200
    options = engine.tokenizer.chats[-1][1]
    assert options["template_kwargs"] == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "style": "short",
        "documents": [{"title": "t"}],
    }
    assert options["continue_final_message"] is True
    assert options["add_generation_prompt"] is False


@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "messages", "bos_token", "tools", "__class__", "a b", "", "x-" * 99]
)
async def test_template_options_cannot_change_how_it_is_rendered(
    client: httpx.AsyncClient, name: str
) -> None:
    response = await client.post("/v1/chat/completions", json=body(chat_template_kwargs={name: 1}))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"chat_template_kwargs.{name[:64]}"


@pytest.mark.parametrize("value", ["text", {"text": "a"}, [{"text": "a"}, "b"]])
async def test_documents_among_the_template_options_are_objects(
    client: httpx.AsyncClient, value: Any
) -> None:
    response = await client.post("/v1/chat/completions", json=body(chat_template_kwargs={"documents": value}))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template_kwargs.documents"


async def test_documents_may_be_among_the_template_options(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for fields, title in (({}, "option"), ({"documents": [{"title": "field"}]}, "field")):
        request = body(chat_template_kwargs={"documents": [{"title": "option"}]}, **fields)
        assert (await client.post("/v1/chat/completions", json=request)).status_code == 200
        assert engine.tokenizer.chats[-1][1]["template_kwargs"] == {"documents": [{"title": title}]}


async def test_template_that_refuses_is_a_bad_request(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=body("bad template"))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


async def test_what_concerns_the_prefix_cache_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    request = body(cache_salt="tenant", cache_prompt=False)
    assert (await client.post("/v1/chat/completions", json=request)).status_code == 200
    got = engine.requests[0]
    assert (got.cache_salt, got.use_prefix_cache, got.priority) == ("tenant", False, 0)


async def test_sampling_fields_arrive_unchanged(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    request = body(
        temperature=0, top_p=0.5, top_k=7, min_p=0.1, seed=-5, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.1, logit_bias={"5": -100, "6": 1.5}, stop=["x", "y"], stop_token_ids=[9],
        min_tokens=1,
        max_completion_tokens=4, max_tokens=400, ignore_eos=True, include_stop_str_in_output=True,
        skip_special_tokens=False,
    )  # fmt: skip
    assert (await client.post("/v1/chat/completions", json=request)).status_code == 200
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 7, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (-5, 4, 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        1,
        -1,
        1.1,
    )
    assert sampling.logit_bias == ((5, -100.0), (6, 1.5))
    assert (sampling.stop, sampling.stop_token_ids) == (("x", "y"), frozenset({9}))
    assert (sampling.ignore_eos, sampling.include_stop_str_in_output) == (True, True)
    assert not sampling.skip_special_tokens


async def test_request_before_model_before_api_defaults(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.model.generation_defaults.update(temperature=0.6, top_k=20, max_new_tokens=7)
    await client.post("/v1/chat/completions", json=body(top_k=0, temperature=None))
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.6, 0, 1.0, 7)
    engine.model.generation_defaults.clear()
    await client.post("/v1/chat/completions", json=body("four"))
    assert engine.requests[1].sampling.max_tokens == 4096 - 4, "the rest of the context"


NEUTRAL = {
    "stop": None, "stream_options": None, "tools": [], "tool_choice": "auto", "functions": [],
    "logprobs": False,
    "top_logprobs": None, "response_format": {"type": "text"}, "guided_json": None, "best_of": 2, "n": 2,
    "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True,
    "priority": 0, "echo": False, "add_special_tokens": False, "do_sample": True, "typical_p": 1.0,
    "n_predict": -1, "repeat_penalty": 1.0, "mirostat": 0, "mirostat_tau": 5.0,
    "dry_multiplier": 0.0, "dry_base": 1.75, "xtc_probability": 0, "stop_regex": [], "suffix": "",
    "never_heard_of": {"x": [1]}, "max_tokens": None,
}  # fmt: skip


async def test_neutral_values_no_ops_and_unknown_fields_are_accepted(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=body(**NEUTRAL))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("structural_tag", "{}"),
        ("echo", True),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("chat_template", "{{ x }}"),
        ("add_special_tokens", True),
        ("priority", 1),
        ("typical_p", 0.9),
        ("stop_regex", "a+"),
        ("custom_logit_processor", "x"),
        ("options", {"temperature": 0}),
        ("extra_body", {"top_k": 1}),
        ("think", False),
        ("thinking", {"type": "enabled"}),
        ("thinking_token_budget", 5),
        ("tfs_z", 0.9),
        ("samplers", ["top_k"]),
        ("mirostat", 2),
        ("mirostat_tau", 4),
        ("no_repeat_ngram_size", 2),
        ("do_sample", False),
        ("watermark", True),
        ("return_full_text", True),
        ("details", True),
        ("decoder_input_details", True),
        ("typical", 0.5),
        ("banned_tokens", [1]),
        ("top_a", 0.1),
        ("lora", "x"),
        ("truncate", 5),
        ("suffix", "x"),
        ("xtc_probability", 0.5),
        ("dry_multiplier", 0.8),
        ("dynatemp_range", 0.5),
        ("epsilon_cutoff", 1),
        ("eta_cutoff", 1),
        ("smoothing_factor", 0.2),
        ("system", "Be brief."),
    ],
)
async def test_known_fields_that_are_not_built_are_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, name: str, value: Any
) -> None:
    response = await client.post("/v1/chat/completions", json=body(**{name: value}))
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert name in error["message"]
    assert not engine.requests


async def test_unknown_fields_are_logged_once(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="monoloop.server")
    for _ in range(3):
        await client.post("/v1/chat/completions", json=body(peculiar=1, user="x"))
    assert caplog.text.count("peculiar") == 1
    assert "'user'" not in caplog.text, "published no-ops are not worth a line"


@pytest.mark.parametrize("streams", [True, False])
async def test_a_misspelled_field_is_named_in_a_header_and_the_log(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, streams: bool
) -> None:
    for _ in range(2):
        fields = body(temprature=1, maxTokens=3, peculiar=1, stream=streams)
        response = await client.post("/v1/chat/completions", json=fields)
        assert response.status_code == 200
        assert response.headers["x-misspelled-fields"] == (
            "temprature (did you mean temperature?), maxTokens (did you mean max_tokens?)"
        )
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "ignoring the unknown request field temprature; did you mean temperature? (logged once)",
        "ignoring the unknown request field maxTokens; did you mean max_tokens? (logged once)",
    ]
    response = await client.post("/v1/chat/completions", json=body(peculiar=1, temperature=1))
    assert "x-misspelled-fields" not in response.headers


async def test_a_misspelled_field_is_refused_if_the_setting_says_so(engine: FakeEngine) -> None:
    async with client_for(engine, misspelled_fields="refuse") as client:
        response = await client.post("/v1/chat/completions", json=body(peculiar=1, top_pp=0.5))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "top_pp")
        assert error["message"] == "There is no field top_pp; did you mean top_p?"
        assert (await client.post("/v1/chat/completions", json=body(peculiar=1))).status_code == 200


async def test_a_misspelled_field_that_must_be_there_is_named(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={"mesages": [], "x" * 100: 1})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert error["message"] == "messages: Field required; the body has 'mesages'"


@pytest.mark.parametrize("name", ["temperature\r\nx: y", "témperature", "temperature\0", "t" * 1000])
async def test_a_name_that_no_header_can_hold_is_ignored(client: httpx.AsyncClient, name: str) -> None:
    response = await client.post("/v1/chat/completions", json=body(**{name: 1}))
    assert response.status_code == 200
    assert "x-misspelled-fields" not in response.headers


async def test_unknown_model_is_not_found(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=body(model="gpt-9"))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_any_model_name_is_accepted_if_the_setting_says_so(engine: FakeEngine) -> None:
    async with client_for(engine, any_model_name=True, served_model_name=("first", "second")) as client:
        for asked, answered in (("dummy", "first"), ("", "first"), (None, "first"), ("second", "second")):
            response = await client.post("/v1/chat/completions", json=body(model=asked))
            assert (response.status_code, response.json()["model"]) == (200, answered)
        assert (await client.get("/v1/models/dummy")).status_code == 404


async def test_answers_to_every_served_name(engine: FakeEngine) -> None:
    async with client_for(engine, served_model_name=("a/b", "c")) as client:
        for asked, told in (("a/b", "a/b"), ("c", "c"), (None, "a/b")):
            response = await client.post("/v1/chat/completions", json=body(model=asked))
            assert response.json()["model"] == told
        assert (await client.post("/v1/chat/completions", json=body(model=MODEL_NAME))).status_code == 404


async def test_context_overflow_is_recognised_by_clients(client: httpx.AsyncClient) -> None:
    for content, fields in (("x" * 4096, {}), ("x" * 10_000, {}), ("xxxx", {"max_tokens": 4093})):
        response = await client.post("/v1/chat/completions", json=body(content, **fields))
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 4096 tokens")


async def test_queue_full_and_draining_say_when_to_come_back(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.is_full = True
    response = await client.post("/v1/chat/completions", json=body())
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert response.json()["error"]["code"] == "slow_down"
    engine.is_draining = True
    response = await client.post("/v1/chat/completions", json=body())
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["code"] == "server_is_shutting_down"


async def test_failed_step_is_a_server_error(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.post("/v1/chat/completions", json=body("fail=1", n=2))
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "Computing this request failed.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert not engine.live


async def test_answer_past_the_deadline_is_aborted(engine: FakeEngine) -> None:
    async with client_for(engine, request_timeout_seconds=0.05) as client:
        response = await client.post("/v1/chat/completions", json=body("hang", n=2))
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        response = await client.post("/v1/chat/completions", json=body("slow template"))
        assert response.status_code == 504
    assert not engine.live


async def test_n_is_bound_by_the_engine(client: httpx.AsyncClient) -> None:
    for n, param in ((17, "n"), (129, "n"), (0, "n")):
        response = await client.post("/v1/chat/completions", json=body(n=n))
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_internal_errors_tell_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    def explode(request: object) -> None:
        raise RuntimeError("/secret/path")

    engine.submit = explode  # type: ignore[method-assign, assignment]
    response = await client.post("/v1/chat/completions", json=body())
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["code"] == "internal_error"
