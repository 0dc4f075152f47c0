"""Every way to say what an output must be reaches the engine as a grammar, or is refused by name."""

import json

import pytest

from engine.request import Grammar
from tests.server.conftest import client_for

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
JSON, ANY = Grammar("json_schema", TEXT), Grammar("json_object")
GBNF = 'root ::= "a" | "b"'
NAMED = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}

SPELLINGS = [
    ({"response_format": {"type": "text"}}, None, ""),
    (
        {"response_format": None, "guided_json": None, "grammar": "", "format": "", "json_object": False},
        None,
        "",
    ),
    ({"guided_json_object": False, "guided_decoding_backend": "xgrammar"}, None, ""),
    ({"structured_outputs": {}}, None, ""),
    ({"response_format": {"type": "json_object"}}, ANY, "response_format"),
    ({"response_format": NAMED}, JSON, "response_format"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON, "response_format"),
    ({"structured_outputs": {"json": SCHEMA}}, JSON, "structured_outputs.json"),
    ({"structured_outputs": {"json": TEXT}}, JSON, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+"), "structured_outputs.regex"),
    (
        {"structured_outputs": {"choice": ["a", "ä"]}},
        Grammar("choice", '["a","ä"]'),
        "structured_outputs.choice",
    ),
    ({"structured_outputs": {"grammar": GBNF}}, Grammar("ebnf", GBNF), "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": True}}, ANY, "structured_outputs.json_object"),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
        Grammar("json_schema", TEXT, " ?"),
        "structured_outputs.json",
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
        Grammar("json_schema", TEXT, closes_objects=False),
        "structured_outputs.json",
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        Grammar("json_schema", TEXT, closes_objects=True),
        "structured_outputs.json",
    ),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        Grammar("json_object", whitespace=""),
        "structured_outputs.json_object",
    ),
    ({"guided_json": SCHEMA}, JSON, "guided_json"),
    ({"guided_json": TEXT, "guided_whitespace_pattern": ""}, Grammar("json_schema", TEXT, ""), "guided_json"),
    ({"guided_json_object": True}, ANY, "guided_json_object"),
    ({"guided_regex": "a+"}, Grammar("regex", "a+"), "guided_regex"),
    ({"guided_choice": ["a"]}, Grammar("choice", '["a"]'), "guided_choice"),
    ({"guided_grammar": GBNF}, Grammar("ebnf", GBNF), "guided_grammar"),
    ({"regex": "a+"}, Grammar("regex", "a+"), "regex"),
    ({"ebnf": GBNF}, Grammar("ebnf", GBNF), "ebnf"),
    ({"json_schema": TEXT}, JSON, "json_schema"),
    ({"json_schema": SCHEMA}, JSON, "json_schema"),
    ({"json_object": True}, ANY, "json_object"),
    ({"format": "json"}, ANY, "format"),
    ({"format": SCHEMA}, JSON, "format"),
    ({"grammar": GBNF}, Grammar("ebnf", GBNF), "grammar"),
    ({"grammar": {"type": "json", "value": SCHEMA}}, JSON, "grammar"),
    ({"grammar": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}}, JSON, "grammar"),
    ({"grammar": {"type": "regex", "value": "a+"}}, Grammar("regex", "a+"), "grammar"),
]


@pytest.mark.parametrize(("fields", "expected", "param"), SPELLINGS)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_spellings(client, engine, path, fields, expected, param):
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": ["hi", "ho"]}
    response = await client.post(f"/v1/{path}", json=prompt | fields | {"n": 2, "max_tokens": 4})
    assert response.status_code == 200, response.text
    grammars = [request.sampling.grammar for request in engine.requests]
    assert grammars == [expected] * len(grammars) and len(grammars) in (2, 4)
    if expected is not None:
        assert grammars[0].param == param


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BAD = [
    ({"response_format": {"type": "xml"}}, "response_format.type", ""),
    ({"response_format": "json"}, "response_format", ""),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema"),
    ({"response_format": NAMED, "guided_regex": "a"}, "guided_regex", "response_format and guided_regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "one of them"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ""),
    ({"structural_tag": "x"}, "structural_tag", "not supported"),
    ({"guided_choice": []}, "guided_choice", ""),
    ({"guided_choice": ["a", 1]}, "guided_choice[1]", ""),
    ({"guided_json": [1]}, "guided_json", ""),
    ({"guided_json": "{"}, "guided_json", "Invalid schema for guided_json: "),
    ({"guided_regex": 5}, "guided_regex", ""),
    ({"guided_regex": "a\0"}, "guided_regex", "NUL"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "Invalid guided_grammar: "),
    ({"grammar": {"type": "regex", "value": {}}}, "grammar", ""),
]


@pytest.mark.parametrize(("fields", "param", "hint"), BAD)
async def test_what_is_wrong_is_named(client, fields, param, hint):
    response = await client.post("/v1/chat/completions", json=CHAT | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param) and hint in error["message"], error


DEEP = {}
for _ in range(100):
    DEEP = {"type": "array", "items": DEEP}


async def test_a_bad_schema_is_told_as_openai_does(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": DEEP}}
    response = await client.post("/v1/chat/completions", json=CHAT | {"response_format": wanted})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "response_format"
    message = "Invalid schema for response_format 'person': it is nested deeper"
    assert error["message"].startswith(message)
    form = {"type": "json_schema", "name": "person", "schema": DEEP}
    error = (await client.post("/v1/responses", json={"input": "hi", "text": {"format": form}})).json()[
        "error"
    ]
    assert error["message"].startswith(message) and error["param"] == "text.format"


async def test_responses_have_their_own_place_for_it(client, engine):
    form = {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}
    body = {"input": "hi", "text": {"format": form}}
    response = await client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert engine.requests[-1].sampling.grammar == JSON
    assert response.json()["text"]["format"] == form | {"description": None}
    body["text"]["format"] = {"type": "json_object"}
    response = await client.post("/v1/responses", json=body)
    assert engine.requests[-1].sampling.grammar == ANY
    assert response.json()["text"]["format"] == {"type": "json_object"}
    body["text"]["format"] = {"type": "json_schema", "name": "x"}
    assert (await client.post("/v1/responses", json=body)).json()["error"]["param"] == "text.format"


async def test_messages_have_their_own_place_for_it(client, engine):
    body = {"model": "fake-model", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    response = await client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert engine.requests[-1].sampling.grammar == JSON
    form = body.pop("output_config")["format"]
    response = await client.post("/v1/messages", json=body | {"output_format": form})
    assert response.status_code == 200, response.text
    assert engine.requests[-1].sampling.grammar == JSON
    deep = {"type": "json_schema", "schema": DEEP}
    for name, fields in (
        ("output_config.format", {"output_config": {"format": deep}}),
        ("output_format", {"output_format": deep}),
    ):
        error = (await client.post("/v1/messages", json=body | fields)).json()["error"]
        assert error["message"].startswith(f"Invalid schema for {name}: it is nested deeper"), error
    for config, status in (({"format": form}, 400), ({"effort": "low"}, 200)):
        both = {"output_format": form, "output_config": config}
        response = await client.post("/v1/messages", json=body | both)
        assert response.status_code == status, response.text


NATIVE = [
    ({"grammar": {"type": "json", "value": SCHEMA}}, JSON),
    ({"grammar": {"type": "regex", "value": "a+"}}, Grammar("regex", "a+")),
    ({"regular_constraint": "a+"}, Grammar("regex", "a+")),
    ({"guided_json": TEXT}, JSON),
    ({"guided_grammar": GBNF}, Grammar("ebnf", GBNF)),
]


@pytest.mark.parametrize(("parameters", "expected"), NATIVE)
async def test_native_generate_has_its_own_names(engine, parameters, expected):
    async with client_for(engine, generate_api="lightllm") as client:
        response = await client.post("/generate", json={"inputs": "hi", "parameters": parameters})
    assert response.status_code == 200, response.text
    assert engine.requests[-1].sampling.grammar == expected


NATIVE_FAULTS = [
    ({"grammar": {"type": "json", "value": DEEP}}, "Invalid schema for parameters.grammar: "),
    ({"grammar": {"type": "regex", "value": "a\0"}}, "Invalid parameters.grammar: "),
    ({"regular_constraint": "a\0"}, "Invalid parameters.regular_constraint: "),
    ({"guided_json": DEEP}, "Invalid schema for parameters.guided_json: "),
    ({"guided_grammar": "root ::= ("}, "Invalid parameters.guided_grammar: "),
    (
        {"guided_json": {}, "regular_constraint": "a"},
        "parameters.guided_json and parameters.regular_constraint both say",
    ),
    (
        {"min_new_tokens": 9, "max_new_tokens": 5},
        "parameters.min_new_tokens must be at most max_new_tokens, ",
    ),
]


@pytest.mark.parametrize(("parameters", "message"), NATIVE_FAULTS)
async def test_native_errors_name_fields_as_they_were_sent(engine, parameters, message):
    async with client_for(engine, generate_api="lightllm") as client:
        response = await client.post("/generate", json={"inputs": "hi", "parameters": parameters})
    assert response.status_code == 400
    assert response.json()["message"].startswith(message), response.text
