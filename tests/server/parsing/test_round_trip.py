"""Calls written in each format, as models write them, are read back with the arguments they had."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.parsing.argument_types import NAMES
from server.parsing.formats import tool_formats
from server.parsing.parser import Tools
from tests.server.parsing.texts import make, parse

Arguments = dict[str, Any]
Call = tuple[str, Arguments]

# The ends of values: text has no way to write them inside one.
ENDS = ("</parameter>", "</arg_value>", "</｜DSML｜parameter>", "<escape>", '<|"|>')
TEXT = st.text(st.sampled_from("ab \"'\\\n\t<>|/{}[](),:;=`éД😀\u2028"), max_size=8) | st.sampled_from(
    [
        "</tool_call>",
        "<|end|>",
        "<|call|>",
        "[TOOL_CALLS]",
        "null",
        "2",
        "[1]",
        "```",
        "<function=",
        "</think>",
    ]
)
SCALARS = (
    TEXT | st.integers(-(10**20), 10**20) | st.booleans() | st.none() | st.sampled_from([0.5, -1e-9, 1e300])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b c", "é"]), inner, max_size=3)
    ),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["f", "get_weather-2"]),
        st.dictionaries(st.sampled_from(["a", "city_name", "x1"]), VALUES, max_size=3),
    ),
    min_size=1,
    max_size=3,
    unique_by=repr,
)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def objects(name: str = "name", arguments: str = "arguments") -> Callable[[list[Call]], list[str]]:
    return lambda calls: [dumps({name: called, arguments: passed}) for called, passed in calls]


def tagged(head: str, argument: str, tail: str) -> Callable[[list[Call]], str]:
    """Return what writes calls in tags; `{}` are places for names, keys and values."""

    def write(calls: list[Call]) -> str:
        return "\n".join(
            head.replace("{}", name)
            + "".join(
                argument.replace("{}", key, 1)
                .replace("{type}", str(isinstance(value, str)).lower())
                .replace("{}", plain(value), 1)
                for key, value in passed.items()
            )
            + tail
            for name, passed in calls
        )

    return write


def quoted(value: Any, quote: str) -> str:
    """Return a value as Gemma writes it."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(quoted(item, quote) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{quote}{key}{quote}:{quoted(item, quote)}' for key, item in value.items())}}}"
    return dumps(value)


def gemma(start: str, end: str, quote: str) -> Callable[[list[Call]], str]:
    return lambda calls: "".join(
        f"{start}call:{name}{{"
        + ",".join(f"{key}:{quoted(value, quote)}" for key, value in passed.items())
        + f"}}{end}"
        for name, passed in calls
    )


NAMESPACE = "]<]minimax[>["


def elements(name: str, value: Any) -> str:
    """Return a value as MiniMax M3 writes it."""
    text = plain(value)
    if isinstance(value, list):
        text = "".join(elements("item", item) for item in value)
    elif isinstance(value, dict):
        text = "".join(elements(key, item) for key, item in value.items())
    return f"{NAMESPACE}<{name}>{text}{NAMESPACE}</{name}>"


def strings(value: Any) -> bool:
    """Return True if all values inside a list or an object are strings: text has no other types there."""
    inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return all(
        isinstance(item, str) or (isinstance(item, list | dict) and bool(item) and strings(item))
        for item in inner
    )


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects()(calls)),
    "llama3_json": lambda calls: "; ".join(objects("name", "parameters")(calls)),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(passed)}" for name, passed in calls),
    "pythonic": lambda calls: "<|python_start|>[{}]<|python_end|>".format(
        ", ".join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in passed.items())})"
            for name, passed in calls
        )
    ),
    "harmony": lambda calls: "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(passed)}<|call|>"
        for name, passed in calls
    ),
    "granite": lambda calls: f"<|tool_call|>[{', '.join(objects()(calls))}]",
    "phi4_mini": lambda calls: f"<|tool_call|>[{', '.join(objects()(calls))}]<|/tool_call|>",
    "cohere": lambda calls: (
        "<|START_ACTION|>[\n" + ",\n".join(objects("tool_name", "parameters")(calls)) + "\n]<|END_ACTION|>"
    ),
    "minimax": lambda calls: "<tool_calls>\n" + "\n".join(objects()(calls)) + "\n</tool_calls>",
    "internlm": lambda calls: "".join(
        f"<|action_start|><|plugin|>\n{text}<|action_end|>\n" for text in objects("name", "parameters")(calls)
    ),
    "deepseek_v3": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(passed)}\n```<｜tool▁call▁end｜>"
            for name, passed in calls
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "kimi_k2": lambda calls: "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{dumps(passed)}<|tool_call_end|>"
        for number, (name, passed) in enumerate(calls)
    ),
    "glm45": tagged("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
    "qwen3_coder": tagged(
        "<tool_call>\n<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>"
    ),
    "seed_oss": tagged(
        "<seed:tool_call>\n<function={}>\n",
        "<parameter={}>{}</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
    "minimax_m2": tagged('<invoke name="{}">\n', '<parameter name="{}">{}</parameter>\n', "</invoke>"),
    "deepseek_v32": tagged(
        '<｜DSML｜invoke name="{}">\n',
        '<｜DSML｜parameter name="{}" string="{type}">{}</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>",
    ),
    "minimax_m3": lambda calls: "".join(
        f'{NAMESPACE}<invoke name="{name}">'
        + "".join(elements(key, value) for key, value in passed.items())
        + f"{NAMESPACE}</invoke>\n"
        for name, passed in calls
    ),
    "functionary_v31": lambda calls: "".join(
        f"<function={name}>{dumps(passed)}</function>" for name, passed in calls
    ),
    "nemotron": lambda calls: f"<TOOLCALL>[{', '.join(objects()(calls))}]</TOOLCALL>",
    "function_gemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
}


def tools_of(calls: list[Call]) -> Tools:
    """Return tools whose arguments have the types of those in the calls."""
    parameters: dict[str, dict[str, Any]] = {}
    for name, passed in calls:
        properties = parameters.setdefault(name, {"properties": {}})["properties"]
        for key, value in passed.items():
            types = properties.setdefault(key, {"type": []})["type"]
            if (kind := NAMES[type(value)]) not in types:
                types.append(kind)
    return Tools(parameters)


def is_ambiguous(name: str, calls: list[Call]) -> bool:
    """Return True if text has no way to say which type of value it is, or is not written as it is."""
    if name == "minimax_m3" and not all(strings(value) for _, passed in calls for value in passed.values()):
        return True
    if name not in ("glm45", "qwen3_coder", "seed_oss", "minimax_m2", "minimax_m3"):
        return False
    mixed = set() if name == "minimax_m3" else {"string"}  # types that may have the same text
    properties = [schema["properties"].values() for schema in tools_of(calls).parameters.values()]
    return any(
        mixed <= set(schema["type"]) and len(schema["type"]) > 1
        for schemas in properties
        for schema in schemas
    )


@pytest.mark.parametrize("name", tool_formats())
@settings(max_examples=60, deadline=None)
@given(calls=CALLS)
def test_calls_are_read_as_they_were_written(name: str, calls: list[Call]) -> None:
    text = WRITERS[name](calls)
    if is_ambiguous(name, calls) or any(end in dumps(calls).replace('\\"', '"') for end in ENDS):
        return
    message = parse(make(name, tools_of(calls)), *(text[at : at + 3] for at in range(0, len(text), 3)))
    found = [(call.name, json.loads(call.arguments)) for call in message.calls]
    assert found == calls, text
    assert message.content.strip() == ""
    assert all(call.is_complete for call in message.calls)


def test_every_format_is_written() -> None:
    assert set(WRITERS) == set(tool_formats())
