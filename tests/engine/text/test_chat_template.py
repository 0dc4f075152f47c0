"""Chat templates: read from a file, rendered as in transformers, and bounded in time and size."""

import asyncio
import itertools

import jinja2
import pytest
from transformers import AutoTokenizer

from engine.config import EngineConfig
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.startup import load, load_tokenizer
from engine.text.chat_template import ChatTemplate, read_template
from engine.text.template_sandbox import Rendering
from engine.text.tokenizer_pool import TokenizerPool
from tests.engine.text.test_tokenizer import PROMPT, encode_chat, user

OTHER = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_a_template_file_is_read_unchanged(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_bytes(b"\xef\xbb\xbf" + (OTHER + "\n{% generation %}é{% endgeneration %}\n").encode())
    assert read_template(file) == OTHER + "\n{% generation %}é{% endgeneration %}\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (b" \n", "is empty"),
        (b"a\n{% for m in messages %}", "has an error in line 2: Unexpected end of template"),
        (b"{{ a | no_such_filter }}", "has an error in line 1: No filter named"),
        (b"{% if x %}" * 200 + b"{% endif %}" * 200, "does not compile: too many"),
    ],
)
async def test_invalid_template_files_are_refused_with_the_setting(tmp_path, content, problem):
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match="chat_template: ") as caught:
        await load(EngineConfig(model="no such model", chat_template=file), print)
    assert str(caught.value).startswith(f"chat_template: {file} {problem}")


async def test_a_folder_is_no_template(tmp_path):
    with pytest.raises(ValueError, match=r"chat_template: .* cannot be read"):
        await load(EngineConfig(model="no such model", chat_template=tmp_path), print)


@pytest.mark.parametrize("own", [None, PROMPT])
async def test_it_takes_the_place_of_the_models_own(make_tokenizer, own: str | None):
    tokenizer = make_tokenizer(own, chat_template=OTHER)
    pool = TokenizerPool(tokenizer, num_threads=1, max_model_len=100)
    assert pool.chat_template == OTHER
    assert await pool.decode(await pool.encode_chat(user("hello"))) == "<user>hello"
    messages = [*user("a"), {"role": "assistant", "content": "Once"}]
    ids = await pool.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert await pool.decode(ids) == "<user>a<assistant>Once"
    pool.close()


@pytest.mark.parametrize(
    ("named", "chosen"), [({"default": OTHER, "rag": "x"}, OTHER), ({"a": OTHER, "b": "x"}, None)]
)
def test_of_several_templates_the_default_is_used(make_tokenizer, named: dict[str, str], chosen: str | None):
    assert make_tokenizer(named).chat_template == chosen


def test_a_model_in_one_file_takes_it_too(smollm, tmp_path):
    assert smollm.format == "gguf"
    tokenizer, _ = load_tokenizer(smollm, OTHER)
    assert tokenizer.decode(encode_chat(tokenizer, user("hello"))) == "<user>hello"


def test_names_that_decide_the_rendering_are_reserved(make_tokenizer):
    tokenizer = make_tokenizer(PROMPT, model_specific_special_tokens={"image_token": "<|image|>"})
    assert tokenizer.reserved_variables >= {"bos_token", "eos_token", "pad_token", "unk_token", "image_token"}
    assert tokenizer.reserved_variables >= {"self", "messages", "conversation", "conversations", "tokenize"}
    assert tokenizer.reserved_variables >= {"raise_exception", "namespace", "range"}
    sent = {"enable_thinking", "thinking", "reasoning_effort", "date_string", "documents", "custom_tools"}
    assert not tokenizer.reserved_variables & sent


@pytest.mark.parametrize("name", ["system_message", "builtin_tools", "exc", "environment", "text", "kw"])
def test_other_names_are_variables_of_the_template(make_tokenizer, name: str):
    tokenizer = make_tokenizer("{{ " + name + " }}")
    assert name not in tokenizer.reserved_variables
    assert tokenizer.decode(encode_chat(tokenizer, user("a"), template_kwargs={name: "value"})) == "value"


SPIN = (
    "{% if spin %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)
SAYS = SPIN + "{% if size %}{{ 'x' * size }}{% endif %}" + PROMPT


async def test_a_slow_template_frees_its_thread(make_tokenizer):
    pool = TokenizerPool(make_tokenizer(SAYS), num_threads=1, max_model_len=100, render_seconds=0.05)
    spins = [pool.encode_chat(user("a"), template_kwargs={"spin": True}) for _ in range(2)]
    async with asyncio.timeout(30):
        for outcome in await asyncio.gather(*spins, return_exceptions=True):
            assert isinstance(outcome, InvalidRequest), outcome
            assert (str(outcome), outcome.param) == (
                "The chat template took longer than 0.05 s.",
                "messages",
            )
        for _ in range(3):
            assert await pool.decode(await pool.encode_chat(user("hello"))) == "[user]hello[assistant]"
    pool.close()


async def test_a_cancelled_caller_frees_the_thread(make_tokenizer):
    pool = TokenizerPool(make_tokenizer(SAYS), num_threads=1, max_model_len=100)
    spins = [
        asyncio.create_task(pool.encode_chat(user("a"), template_kwargs={"spin": True})) for _ in range(2)
    ]
    await asyncio.sleep(0.05)
    for spin in spins:
        spin.cancel()
    async with asyncio.timeout(30):
        await asyncio.wait(spins)
        assert await pool.decode(await pool.encode_chat(user("hello"))) == "[user]hello[assistant]"
    pool.close()


async def test_template_output_is_bounded_by_the_context(make_tokenizer):
    tokenizer = make_tokenizer(SAYS)
    pool = TokenizerPool(tokenizer, num_threads=1, max_model_len=100)
    size = pool.max_prompt_chars - len("[user]<|end|>[assistant]")
    for text, shown in (("", ""), ("<|end|>", "<|end|>")):  # marks around it do not count
        fits = {"size": size - len(text)}
        ids = await pool.encode_chat(user(text), template_kwargs=fits)
        said = await pool.decode(ids, skip_special_tokens=False)
        assert said == "x" * fits["size"] + f"[user]{shown}<|end|>[assistant]"
        with pytest.raises(ContextLengthExceeded, match="maximum context length") as caught:
            await pool.encode_chat(user(text), template_kwargs={"size": fits["size"] + 1})
        assert caught.value.param == "messages"
    pool.close()


TEMPLATES = {
    "plain": "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "stripped": "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}"
    "{{ eos_token }}"
    "{% endfor %}",
    "loops": "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}{{ ',' if not loop.last }}"
    "{{ loop.cycle(1, 2) }}"
    "{% if loop.first %}{% continue %}{% endif %}{{ loop.previtem.role }}{{ loop.nextitem is defined }}"
    "{% if loop.index > 3 %}{% break %}{% endif %}{{ m.content }}{% else %}none{% endfor %}",
    "filters": "{% for m in messages | selectattr('role', 'equalto', 'user') | reverse %}"
    "{{ m.content | upper }}"
    "{% endfor %}{{ messages | map(attribute='role') | unique | join('+') }}{{ messages[1:] | length }}",
    "namespaces": "{% set ns = namespace(n=0, last=none) %}{% for m in messages if m.role != 'system' %}"
    "{% set ns.n = ns.n + 1 %}{% set ns.last = m.content %}{% endfor %}{{ ns.n }}:{{ ns.last }}:content",
    "macros": "{% macro say(m, mark='>') -%}{{ mark }}{{ m.content }}{%- endmacro %}"
    "{% for m in messages %}{{ say(m) }}{{ say(m, mark='#') }}{% endfor %}{{ dict(a=1).a }}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2, ensure_ascii=true) }}{{ tools | tojson }}",
    "tools": "{% if tools is not none %}{% for t in tools %}{{ t.function.name }}"
    "{{ t | tojson(sort_keys=true) }}"
    "{% endfor %}{% else %}no tools{% endif %}{{ documents is none }}{{ extra is defined }} content",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}"
    "{% endfor %}{{ x is defined }}",
    "whitespace": "  {% for m in messages %}\n  {%- if m.role == 'user' %}\n  {{ m.content }}\n  "
    "{% endif -%}\n\n"
    "{% endfor %}\n\n{# note #}\nend content",
    "content parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}"
    "{{ c.text | trim }}{% endfor %}{% endif %}<|end|>{% endfor %}",
    "errors": "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    "{{ messages[0].content }}",
}
PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": " two "}]
CHATS = [
    [{"role": "user", "content": "hello"}],
    [
        {"role": "system", "content": " be good \n"},
        {"role": "user", "content": "hé <b>&</b>"},
        {"role": "assistant", "content": "  hi  "},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "Once upon a "},
    ],
    [{"role": "user", "content": PARTS}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
FLAGS = ("add_generation_prompt", "continue_final_message")
OPTIONS = [
    {},
    {"add_generation_prompt": True},
    {"continue_final_message": True},
    {"tools": TOOLS, "extra": [1, {"a": None}], "documents": [{"title": "t"}]},
]


def outcome(function, *args, **options):
    try:
        return function(*args, **options)
    except Exception as error:
        kinds = (jinja2.exceptions.SecurityError, jinja2.TemplateError, TypeError)
        return next((kind for kind in kinds if isinstance(error, kind)), ValueError)


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_conversations_render_as_in_transformers(make_tokenizer, tmp_path, source):
    make_tokenizer(source, bos_token="<s>")
    hf = AutoTokenizer.from_pretrained(tmp_path)
    template = ChatTemplate(source, hf.special_tokens_map)
    for chat, options in itertools.product(CHATS, OPTIONS):
        theirs = outcome(hf.apply_chat_template, chat, tokenize=False, **options)
        flags = {
            name: options.get(name, False) for name in ("add_generation_prompt", "continue_final_message")
        }
        variables = {name: value for name, value in options.items() if name not in flags}
        ours = outcome(template.render, chat, variables, Rendering(60), max_chars=10_000, **flags)
        assert ours == theirs, (chat, options)


def test_null_fields_are_dropped_and_reasoning_is_found_under_every_name():
    template = ChatTemplate(
        "{{ messages[0].a is defined }}{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    )
    for name in ("reasoning_content", "thinking", "reasoning"):
        chat = [{"role": "assistant", "a": None, name: "hm"}]
        text = template.render(
            chat,
            {},
            Rendering(60),
            add_generation_prompt=False,
            continue_final_message=False,
            max_chars=99,
        )
        assert text == "Falsehmhm"


EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('later') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (EACH, True),
        (EACH.replace("<{{ m.role }}>", "<{{ 'system' if m.role == 'developer' else m.role }}>"), True),
        (FIRST_ONLY, False),
        (FIRST_ONLY.replace("m.role == 'system'", "m.role in ('system', 'developer')"), False),
        (
            EACH.replace("{% for", "{% set _ = 'developer' %}{% for").replace(
                " in messages", " in messages if m.role != 'developer'"
            ),
            False,
        ),
        (
            "{{ messages[0].content }}{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            False,
        ),
        ("{{ raise_exception('no') }}", False),
    ],
)
def test_templates_that_render_system_messages_anywhere_are_found(source: str, expected: bool):
    assert ChatTemplate(source).takes_system_anywhere() is expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [(EACH, True), (FIRST_ONLY, True), (FIRST_ONLY.replace(" and not loop.first", ""), False)],
)
def test_templates_that_render_no_system_message_are_found(source: str, expected: bool):
    assert ChatTemplate(source).takes_system() is expected


def test_content_beside_calls_may_be_null():
    shows = "{% for m in messages %}[{{ m['content'] is none }}, {{ m['name'] is defined }}]{% endfor %}"
    turn = {"role": "assistant", "content": None, "name": None}
    for calls, expected in (([{}], "[True, False]"), ([], "[False, False]")):
        shown = ChatTemplate(shows).render(
            [turn | {"tool_calls": calls}],
            {},
            Rendering(9),
            add_generation_prompt=False,
            continue_final_message=False,
            max_chars=99,
        )
        assert shown == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'f<sep>' + call.arguments + '<end>' }}", 'f<sep>{"a": "é", "b": [1]}<end>'),
        ("{{ call.arguments + '<end>' }}", '{"a": "é", "b": [1]}<end>'),
        ("{{ call.arguments | tojson }}", '{"a": "é", "b": [1]}'),
        (
            "{% if call.arguments is mapping and call.arguments is not string %}{{ call.arguments.a }}"
            "{% endif %}",
            "é",
        ),
        ("{% for k, v in call.arguments.items() %}{{ k }}={{ v }};{% endfor %}", "a=é;b=[1];"),
    ],
)
def test_arguments_of_calls_are_a_mapping_and_text(source: str, expected: str):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é", "b": [1]}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    template = ChatTemplate("{% set call = messages[0].tool_calls[0].function %}" + source)
    text = template.render(
        messages, {}, Rendering(9), add_generation_prompt=True, continue_final_message=False, max_chars=9999
    )
    assert text == expected
