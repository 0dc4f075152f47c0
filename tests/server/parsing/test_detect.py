"""Which formats a model's chat template shows."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from server.flags import SettingsError
from server.parsing.detect import Formats, ReasoningSetting, ToolSetting
from server.parsing.formats import reasoning_formats, tool_formats, whole_formats


class Facts:
    added_tokens: dict[str, int] = {"<tool_call>": 7}  # noqa: RUF012

    def __init__(self, chat_template: str | None, response_template: dict[str, Any] | None = None) -> None:
        self.chat_template = self.tool_template = chat_template
        self.response_template = response_template


OWN = {"fields": {"thinking": {}, "tool_calls": {}, "content": {}}}
ANSWERS_ONLY = {"fields": {"content": {}}}


@pytest.mark.parametrize(
    ("template", "own", "tools", "reasoning"),
    [
        ("{% for message in messages %}", None, "hermes", None),
        (None, None, "hermes", None),
        ("{{ message['tool_calls'] }}<｜tool▁call▁begin｜></think>", None, "deepseek_v3", "think"),
        ("{{ message.content }}<arg_key>", None, "hermes", None),  # only a template writes the format
        ("{% if tools %}<tool_call>\n{\"name\"", None, "hermes", None),
        ("{% if tools %}<tool_call>{% endif %}<think>", None, "hermes", "think"),
        ("{{ tools }}<tool_call><function=f><parameter=a></think>", None, "qwen3_coder", "think"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", None, "mistral", None),
        ("{% if tools %}[TOOL_CALLS]{% endif %}[THINK]", None, "mistral", "mistral"),
        ("{{ tools }}<|python_tag|>", None, "llama3_json", None),
        ('{{ tools }}{"name": function name, "parameters": dictionary of', None, "llama3_json", None),
        ("{{ tools }}<|tool_call_start|>", None, "pythonic", None),
        ("{{ tools }}'<｜tool▁call▁begin｜>' + tool['type']<think>", None, "deepseek_v3", "think"),
        ("{{ tools }}<|tool_call_begin|>", None, "kimi_k2", None),
        ("{{ tools }}<|START_ACTION|>[", None, "cohere", None),
        ("{{ tools }}Action: ```json", None, "cohere", None),
        ("{{ tools }}{{ 'Action:\\n```json\\n[' }}", None, "cohere", None),
        ("{{ message['tools'] }}<|/tool|>", None, "phi4_mini", None),
        ("{{ tools }} only with <|tool_call|> followed by a JSON list", None, "granite", None),
        ("{{ tools }}<tool_calls>", None, "minimax", None),
        ("{{ tools }}<|plugin|>", None, "internlm", None),
        ("{{ tools }}```tool_code", None, "pythonic", None),
        ("{{ tools }}'<start_function_call>call:'", None, "function_gemma", None),
        ("{{ tools }}<|tool_call>call:", OWN, "gemma4", "response_template"),
        ("{{ tools }}<minimax:tool_call></think>{{ m }}<response>{{ m }}", None, "minimax_m2", "think"),
        ("{{ tools }}<think>\\n' + m + '\\n</think>\\n\\n<response>\\n", None, None, "think_response"),
        ("{{ content.split('<answer>') }}</think>", None, "hermes", "think_response"),
        ("{{ tools }}<seed:tool_call><seed:think>", None, "seed_oss", "seed_oss"),
        ("{{ tools }}<|START_ACTION|><|START_THINKING|>", None, "cohere", "cohere"),
        ("{{ tools }}Write your thoughts after 'Here is my thought process:'", None, None, "granite"),
        ("{{ tools }}<think></think> and <response></response>", None, None, "think_response"),
        ("{{ tools }}<tool_call><tool_response><think>", None, "hermes", "think"),
        ("{{ tools }}<tool_call>name<arg_key></think>", None, "glm45", "think"),
        ("{{ ']<]minimax[>[' }}{{ tools }}<tool_call><mm:think>", None, "minimax_m3", "minimax_m3"),
        ("{{ tools }}'<function=' + name + '>' + args + '</function>'", None, "functionary_v31", None),
        ("{{ tools }}in <tool_call></tool_call> tags: <tool_calls>[", None, "minimax", None),
        ("{{ tools }}<tool_calls>Here are my reasoning steps:", None, "minimax", "apriel"),
        ("{{ tools }}<TOOLCALL>[</TOOLCALL><think>", None, "nemotron", "think"),
        ("{{ 'List of tools: [' }}{{ tools }}", None, "pythonic", None),
        ("{{ 'List of tools: <|tool_list_start|>[' }}{{ tools }}", None, "pythonic", None),
        ("{{ tools }}<|tool_call>call:{{ '<|channel>thought' }}", OWN, "gemma4", "gemma4"),
        ("{{ tools }}<minimax:tool_call><invoke name=", None, "minimax_m2", None),
        ("{{ tools }}{%- set dsml_token = '｜DSML｜' -%}", None, "deepseek_v32", None),
        ("{{ tools }}<seed:tool_call><function=", None, "seed_oss", None),
        ("{{ tools }}<|channel|>analysis<|message|>", OWN, "harmony", "harmony"),
        ("{{ tools }}<|other|>", OWN, "response_template", "response_template"),
        ("{{ tools }}<|other|>", ANSWERS_ONLY, None, None),
        ("{{ tools }}<tool_call><think>", OWN, "hermes", "think"),
    ],
)  # fmt: skip
def test_the_template_shows_the_format(
    template: str | None, own: dict[str, Any] | None, tools: str | None, reasoning: str | None
) -> None:
    formats = Formats.of(Facts(template, own), "auto", "auto")
    assert (formats.tools, formats.reasoning) == (tools, reasoning)
    assert formats.tokens == {"<tool_call>": 7}


def test_settings_win_and_none_is_none() -> None:
    facts = Facts("{{ tools }}<tool_call><think>")
    assert Formats.of(facts, "pythonic", "mistral")[:2] == ("pythonic", "mistral")
    assert Formats.of(facts, "none", "none")[:2] == (None, None)
    with pytest.raises(SettingsError, match=r"tool_parser: .*no response template"):
        Formats.of(facts, "response_template", "auto")
    with pytest.raises(SettingsError, match=r"reasoning_parser: .*no response template"):
        Formats.of(facts, "auto", "response_template")


def test_every_format_is_a_setting() -> None:
    others = {"auto", "none", "response_template"}
    assert set(get_args(ToolSetting)) == {*tool_formats(), *others}
    assert set(get_args(ReasoningSetting)) == {*reasoning_formats(), *whole_formats(), *others}


def test_the_api_page_has_every_format_and_those_without_a_grammar() -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^ *\| `(\w+)` \|", page, re.MULTILINE))
    assert not {*tool_formats(), *reasoning_formats()} - rows, "have no row in docs/api.md"
    without = {
        name
        for name, parser in tool_formats().items()
        if parser.call_rules(dict.fromkeys(parser.markers, 0)) is None
    }
    [listed] = re.findall(r"((?:`\w+`,\s+)*`\w+` and `\w+`)\s+write forced calls as `hermes`", page)
    assert set(re.findall(r"\w+", listed)) - {"and"} == without | {"response_template"}
