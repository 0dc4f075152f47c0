"""Texts as models of each family write them, and what they say: content and calls."""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from engine.outputs import FinishReason, TextDelta
from server.parsing.events import Event, Message
from server.parsing.formats import tool_formats
from server.parsing.parser import Marker, ToolParser, Tools

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": ["string", "null"]},
        "places": {"type": "array"},
    },
}
TOOLS = Tools({"get_weather": WEATHER, "now": {}, "write_file": {"properties": {"text": {"type": "string"}}}})

Calls = list[tuple[str, Any]]


class Text(NamedTuple):
    """A text in a format, its content, and the names and arguments of its calls."""

    format: str
    text: str
    content: str
    calls: Calls


def m3(tags: str) -> str:
    """Return tags, which `|` separates, as MiniMax M3 writes them."""
    return "".join(f"]<]minimax[>[{tag}" for tag in tags.split("|"))


PARIS: tuple[str, Any] = ("get_weather", {"city": "Paris", "days": 2})
TEXTS = [
    Text(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
        "",
        [PARIS],
    ),
    Text(
        "hermes",
        "I'll look both up.\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "I'll look both up.",
        [PARIS, ("now", {})],
    ),
    Text(
        "hermes",
        '<tool_call>[{"name": "now"}, {"name": "get_weather", "arguments": {"city": "A </tool_call> B"}}]'
        "</tool_call> Done.",
        " Done.",
        [("now", {}), ("get_weather", {"city": "A </tool_call> B"})],
    ),
    Text(
        "hermes",
        '<tool_call>{"arguments": "{\\"city\\": \\"Zürich\\"}", "name": "get_weather"}</tool_call>',
        "",
        [("get_weather", {"city": "Zürich"})],
    ),
    Text(
        "hermes",
        'a < b, <tool, <tool_call>: "<tool_call>{"name": 5}</tool_call>"',
        'a < b, <tool, <tool_call>: "<tool_call>{"name": 5}</tool_call>"',
        [],
    ),
    Text(
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
        "",
        [PARIS],
    ),
    Text(
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
        "",
        [("now", {}), PARIS],
    ),
    Text(
        "llama3_json",
        '{"name": "Ada", "age": 36, "children": [{"name": "Byron"}]}',
        '{"name": "Ada", "age": 36, "children": [{"name": "Byron"}]}',
        [],
    ),
    Text("llama3_json", 'It is {"name": "now"}.', 'It is {"name": "now"}.', []),
    Text(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
        "",
        [PARIS, ("now", {})],
    ),
    Text(
        "mistral",
        'One moment.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}'
        "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}",
        "One moment.",
        [PARIS, ("now", {})],
    ),
    Text("mistral", '[TOOL_CALLS]get_weather{"city": "[ARGS]"}', "", [("get_weather", {"city": "[ARGS]"})]),
    Text("mistral", "[TOOL_CALLS] of what?", "[TOOL_CALLS] of what?", []),
    Text("pythonic", "[get_weather(city='Paris', days=2), now()]", "", [PARIS, ("now", {})]),
    Text(
        "pythonic",
        '<|python_start|>[get_weather("O\'Hare", unit=None, places=[{"a": (1, True)}, "]"])]<|python_end|>',
        "",
        [("get_weather", {"city": "O'Hare", "unit": None, "places": [{"a": [1, True]}, "]"]})],
    ),
    Text(
        "pythonic",
        '<function_calls>\nget_weather(city="Paris", days=2)\nnow()\n</function_calls>\nThat\'s it.',
        "\nThat's it.",
        [PARIS, ("now", {})],
    ),
    Text("pythonic", "[now, then] and [later()]", "[now, then] and [later()]", []),
    Text(
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
        "</tool_call>",
        "Sure.",
        [PARIS, ("now", {})],
    ),
    Text(
        "qwen3_coder",
        '<function=write_file>\n<parameter=text>\nif a < b:\n    print("</function>")\n\n</parameter>\n'
        "</function>",
        "",
        [("write_file", {"text": 'if a < b:\n    print("</function>")\n'})],
    ),
    Text(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=unit>null</parameter><parameter=places>['a']</parameter>"
        "<parameter=other>2</parameter></function></tool_call>",
        "",
        [("get_weather", {"unit": None, "places": ["a"], "other": "2"})],
    ),
    Text(
        "harmony",
        "<|channel|>commentary<|message|>I'll look both up.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|>'
        "<|start|>assistant to=functions.now<|channel|>commentary<|message|><|call|>",
        "I'll look both up.",
        [PARIS, ("now", {})],
    ),
    Text(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4 < 5."
        "<|return|>",
        "4 < 5.",
        [],
    ),
    Text(
        "harmony",
        ' to=functions.get_weather<|channel|>analysis code<|message|>{"city": "<|end|>"} ok<|end|>'
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>Sunny.<|end|>",
        "",
        [("get_weather", {"city": "<|end|>"})],
    ),
    Text(
        "harmony",
        "<|channel|>commentary to=functions.now<|message|>no<|end|><|start|>assistant<|channel|>commentary "
        'to=now<|message|>{"a": 1}<|channel|>final<|message|>Done <|message|>it<|end|>assistant'
        "<|channel|>final<|message|>And more.",
        "no\n\nDone it\n\nAnd more.",
        [("now", {"a": 1})],
    ),
    Text("harmony", "A plain answer, <|not a marker.", "A plain answer, <|not a marker.", []),
    Text(
        "glm45",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        "I look.",
        [PARIS, ("now", {})],
    ),
    Text(
        "glm45",
        "<tool_call>get_weather<arg_key>places</arg_key><arg_value>[{'a': 1}, \"x\"]</arg_value><arg_key>unit"
        "</arg_key><arg_value> \n</arg_value><arg_key>none</arg_key></tool_call> Done.",
        " Done.",
        [("get_weather", {"places": [{"a": 1}, "x"], "unit": " \n"})],
    ),
    Text(
        "glm45",
        "The tag <tool_call> is a tag, and <tool_call></tool_call> too.",
        "The tag <tool_call> is a tag, and <tool_call></tool_call> too.",
        [],
    ),
    Text(
        "minimax_m2",
        '\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        "",
        [PARIS, ("now", {})],
    ),
    Text("minimax_m2", "<minimax:tool_call><invoke name=now>", "<minimax:tool_call><invoke name=now>", []),
    Text(
        "minimax_m3",
        "I look.\n"
        + m3('<tool_call>\n|<invoke name="get_weather">|<city>Paris|</city>|<days>2|</days>|</invoke>\n')
        + m3('<invoke name="now">|</invoke>\n|</tool_call>'),
        "I look.",
        [PARIS, ("now", {})],
    ),
    Text(
        "minimax_m3",
        m3('<invoke name="get_weather">|<places>|<item>|<a>x < y|</a>|<a b>|</a b>\n|</item>|<item>z|</item>')
        + m3("</places>|<other>|<item>1|</item>|<key>2|</key>|</other>|</invoke>"),
        "",
        [("get_weather", {"places": [{"a": "x < y", "a b": ""}, "z"], "other": {"item": "1", "key": "2"}})],
    ),
    Text(
        "minimax_m3",
        m3('<invoke name="get_weather">|<places>|</places>stray|</city>| |<city>|</city>|</tool_call>Done.'),
        "Done.",
        [("get_weather", {"places": [], "city": ""})],
    ),
    Text("minimax_m3", "]<]minimax[>[<tool_call>now", "]<]minimax[>[<tool_call>now", []),
    Text(
        "functionary_v31",
        'I look.\n<function=get_weather>{"city": "Paris", "days": 2}</function><function=now></function>',
        "I look.",
        [PARIS, ("now", {})],
    ),
    Text(
        "functionary_v31",
        "<function=now {}, <function> and <function=now>{",
        "<function=now {}, <function> and",
        [("now", {})],
    ),
    Text(
        "nemotron",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, {"name": "now"}]'
        "</TOOLCALL>",
        "",
        [PARIS, ("now", {})],
    ),
    Text(
        "deepseek_v32",
        'So.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="false">[1, </a>]</｜DSML｜parameter>'
        '<｜DSML｜parameter name="y" string="true">2</｜DSML｜parameter></｜DSML｜invoke>'
        "</｜DSML｜function_calls>",
        "So.",
        [PARIS, ("f", {"x": [1, "</a>"], "y": "2"})],
    ),
    Text(
        "deepseek_v32",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="now"></｜DSML｜invoke></｜DSML｜tool_calls>',
        "",
        [("now", {})],
    ),
    Text(
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>2"
        "</parameter>\n</function>\n</seed:tool_call>",
        "",
        [PARIS],
    ),
    Text(
        "seed_oss",
        "<seed:tool_call><function=write_file><parameter=text>\na\n</parameter></function></seed:tool_call>",
        "",
        [("write_file", {"text": "\na\n"})],
    ),
    Text(
        "granite",
        "I look.\n"
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "now", "arguments": {}}]',
        "I look.",
        [PARIS, ("now", {})],
    ),
    Text(
        "granite",
        '<function_call> {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}',
        "",
        [PARIS],
    ),
    Text(
        "granite",
        "The <|tool_call|> marker.",
        "The <|tool_call|> marker.",
        [],
    ),
    Text(
        "phi4_mini",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "now"}]<|/tool_call|> Done.',
        " Done.",
        [PARIS, ("now", {})],
    ),
    Text(
        "phi4_mini",
        'functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
        "",
        [PARIS],
    ),
    Text(
        "phi4_mini",
        "Import functools: [1].",
        "Import functools: [1].",
        [],
    ),
    Text(
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
        '"parameters": {"city": "Paris", "days": 2}},\n    {"tool_call_id": "1", "tool_name": '
        '"now", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [PARIS, ("now", {})],
    ),
    Text(
        "cohere",
        'I look.\nAction:\n```json\n[{"tool_name": "now", "parameters": {}}]```',
        "I look.",
        [("now", {})],
    ),
    Text(
        "cohere",
        'Action: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": {\n '
        '           "city": "a ``` b"\n        }\n    }\n]\n```',
        "",
        [("get_weather", {"city": "a ``` b"})],
    ),
    Text(
        "minimax",
        "Hm.\n"
        '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": '
        '2}}\n{"name": "now", "arguments": {}}\n</tool_calls>',
        "Hm.",
        [PARIS, ("now", {})],
    ),
    Text(
        "minimax",
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]</tool_calls>',
        "",
        [PARIS],
    ),
    Text(
        "internlm",
        "I look.<|action_start|>"
        '<|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}'
        "<|action_end|>\n",
        "I look.",
        [PARIS],
    ),
    Text(
        "deepseek_v3",
        "So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        '<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris", "days": 2}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function"
        "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "So:",
        [PARIS, ("now", {})],
    ),
    Text(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
        '<｜tool▁sep｜>{"city": "Paris", "days": 2}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [PARIS, ("now", {})],
    ),
    Text(
        "deepseek_v3",
        "A <｜tool▁calls▁begin｜> b <｜tool▁call▁begin｜>c {d}",
        "A <｜tool▁calls▁begin｜> b <｜tool▁call▁begin｜>c {d}",
        [],
    ),
    Text(
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "I look.",
        [PARIS, ("now", {})],
    ),
    Text(
        "pythonic",
        "```tool_code\nget_weather(city='Paris', days=2)\n```",
        "",
        [PARIS],
    ),
    Text(
        "function_gemma",
        "I look.<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call><start_function_response>response:now{a:1}",
        "I look.",
        [PARIS, ("now", {})],
    ),
    Text(
        "function_gemma",
        '<start_function_call>call:f{a:[<escape>"x", {y}<escape>,true],b:{c:<escape><escape>},d:<escape>1\n'
        "<escape>}<end_function_call>",
        "",
        [("f", {"a": ['"x", {y}', True], "b": {"c": ""}, "d": "1\n"})],
    ),
    Text("function_gemma", "<start_function_call>now{}", "<start_function_call>now{}", []),
    Text(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
        '<|tool_call>call:f{<|"|>a b<|"|>:<|"|><|<|"|>}<tool_call|> Done.',
        "Done.",
        [PARIS, ("f", {"a b": "<|"})],
    ),
    Text("qwen3_coder", "<tool_call>maybe</tool_call>", "<tool_call>maybe</tool_call>", []),
]


def make(name: str, tools: Tools = TOOLS, marker: Marker | None = None) -> ToolParser:
    """Return a parser of a format; `marker` has the control tokens of its vocabulary, if any."""
    return tool_formats()[name](tools, marker or Marker())


def parse(parser: ToolParser, *pieces: str, is_cut: bool = False) -> Message:
    """Parse text that comes in pieces, and return the message."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return Message.of([*events, *parser.finish(is_cut=is_cut)])


def summary(message: Message) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """Return a message without the ids of its calls, which are random."""
    calls = [(call.name, call.arguments, call.is_complete) for call in message.calls]
    return message.content, message.reasoning, calls


class Stream:
    """The engine's stream of an answer: one delta of one token for each of `texts`."""

    num_prompt_tokens, num_cached_tokens, num_output_tokens, num_reasoning_tokens = 1, 2, 3, 4

    def __init__(
        self, *texts: str, finish: FinishReason = FinishReason.STOP, stop: str | None = None
    ) -> None:
        self.deltas = [TextDelta(text, 1) for text in texts]
        self.deltas[-1] = self.deltas[-1]._replace(finish_reason=finish, stop_reason=stop)
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self

    async def __anext__(self) -> TextDelta:
        if not self.deltas:
            raise StopAsyncIteration
        return self.deltas.pop(0)

    async def collect(self) -> TextDelta:
        text = "".join(delta.text for delta in self.deltas)
        tokens = tuple(token for delta in self.deltas for token in delta.tokens)
        return self.deltas[-1]._replace(text=text, num_tokens=len(self.deltas), tokens=tokens)
