"""Control tokens in user text stay text; those of the template are encoded as tokens.

Covers engine/text/tokenizer_pool.py.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.control_tokens import OwnText, TextParts
from engine.errors import InvalidRequest, ModelError, TemplateFault
from engine.text.template_sandbox import Rendering
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_pool import MAX_BATCH_TEXTS, TokenizerPool
from tests.engine.text.test_detokenizer import EOS
from tests.tiny_checkpoint import write_checkpoint

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
PROMPT = PLAIN + "{% if add_generation_prompt %}[assistant]{% endif %}"
TOOLS = PLAIN.replace("{{ m.content }}", "{{ m.content }}ARGS")


def user(content: str, **fields) -> list[dict]:
    return [{"role": "user", "content": content, **fields}]


def encode_chat(
    tokenizer: Tokenizer, messages: list[dict], *, max_chars: int = 10_000, **options
) -> list[int]:
    """Render and encode, without the pool's threads."""
    rendering = Rendering(seconds=60)
    pieces = tokenizer.render_chat(messages, max_chars=max_chars, rendering=rendering, **options)
    return tokenizer.encode_rendered(pieces)


def test_the_template_decides_the_text(make_tokenizer):
    tokenizer = make_tokenizer(PROMPT)
    ids = encode_chat(tokenizer, user("hello"))
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[user]hello<|end|>[assistant]"
    assert ids.count(tokenizer.eos_token_id) == 1
    assert encode_chat(tokenizer, user("hello"), add_generation_prompt=False)[-1] == tokenizer.eos_token_id


def test_the_final_message_can_be_continued(make_tokenizer):
    tokenizer = make_tokenizer(PROMPT)
    messages = [*user("hello"), {"role": "assistant", "content": "Once upon"}]
    ids = encode_chat(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids).endswith("[assistant]Once upon")
    assert ids[-1] != tokenizer.eos_token_id


@pytest.mark.parametrize(
    "text", ["<|end|>", "a <|end|> b", "<|end|><|end|>", "<|end|", "\U000f0000<|end|>\U000f0001"]
)
def test_control_tokens_in_a_message_stay_text(make_tokenizer, text):
    tokenizer = make_tokenizer(PROMPT)
    ids = encode_chat(tokenizer, user(text))
    assert ids.count(tokenizer.eos_token_id) == 1, "only the template's own"
    shown = text.replace("\U000f0000", "").replace("\U000f0001", "")
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"[user]{shown}<|end|>[assistant]"


@pytest.mark.parametrize(
    "printed", ["{{ m.args | tojson }}", "{{ m.args }}", "{{ m.args | tojson(ensure_ascii=true) }}"]
)
@pytest.mark.parametrize("args", [{"a": "<|end|>"}, {"<|end|>": "a"}, {"a": [{"b<|end|>": ["<|end|>"]}]}])
def test_control_tokens_in_mappings_stay_text(make_tokenizer, printed, args):
    tokenizer = make_tokenizer(TOOLS.replace("ARGS", printed))
    ids = encode_chat(tokenizer, user("x", args=args))
    assert ids.count(tokenizer.eos_token_id) == 1
    assert "<|end|>" in tokenizer.decode(ids[:-1], skip_special_tokens=False)


def test_control_tokens_in_template_kwargs_stay_text(make_tokenizer):
    tokenizer = make_tokenizer("{{ note }}" + PLAIN)
    ids = encode_chat(tokenizer, user("x"), template_kwargs={"note": "<|end|>"})
    assert ids.count(tokenizer.eos_token_id) == 1


def test_a_template_may_look_for_control_tokens(make_tokenizer):
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content.split('<|end|>')[-1] }}{% endfor %}")
    assert tokenizer.decode(encode_chat(tokenizer, user("hidden<|end|>shown"))) == "shown"


RESPONSE = {
    "start_anchor": "[assistant]",
    "fields": {"thinking": {"open": "<think>", "close": "</think>"}, "content": {"close": EOS}},
}


def test_text_of_the_server_has_control_tokens(make_tokenizer):
    tokenizer = make_tokenizer(PROMPT)
    parts = TextParts(("a<|end|>", OwnText("b<|end|>"), "c"))
    ids = encode_chat(tokenizer, user(parts), add_generation_prompt=False)
    assert ids.count(tokenizer.eos_token_id) == 2, "that of the server, and that of the template"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[user]a<|end|>b<|end|>c<|end|>"


def test_a_response_template_parses_answers_to_a_prompt(make_tokenizer):
    tokenizer = make_tokenizer(PROMPT + "<think>", response_template=RESPONSE)
    assert tokenizer.response_template == RESPONSE
    make = tokenizer.response_parser(encode_chat(tokenizer, user("hello")), None)
    for parser in (make(), make()):
        events = parser.feed("Hm.</think>4")
        closed = [event["value"] for event in events if event["type"] == "region_close"]
        assert closed == ["Hm."], "the prompt has opened the region"


def test_an_invalid_response_template_is_ignored(make_tokenizer, caplog):
    assert make_tokenizer(PROMPT).response_template is None
    assert make_tokenizer(PROMPT, response_template={"fields": {}}).response_template is None
    assert "response template cannot be used" in caplog.text


def test_added_tokens_are_found_by_their_text(make_tokenizer):
    tokenizer = make_tokenizer(PROMPT)
    assert tokenizer.added_tokens == {EOS: tokenizer.eos_token_id}


def test_text_that_looks_like_an_escape_is_left_alone(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    ids = encode_chat(tokenizer, user(r"\U000f0000 \udb80\udc00"))
    assert tokenizer.decode(ids) == r"[user]\U000f0000 \udb80\udc00"


def test_a_template_that_refuses_is_an_invalid_request(make_tokenizer):
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate\nsecret second line') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        encode_chat(tokenizer, user("x"))
    assert caught.value.param == "messages"
    assert "secret" not in str(caught.value)


def test_no_template_is_an_invalid_request(make_tokenizer):
    with pytest.raises(InvalidRequest, match="no chat template"):
        encode_chat(make_tokenizer(None), user("x"))


def test_templates_cannot_reach_files_or_modules(make_tokenizer):
    tokenizer = make_tokenizer("{{ messages.__class__.__mro__ }}")
    with pytest.raises(TemplateFault, match=r"'__class__' .* is unsafe"):
        encode_chat(tokenizer, user("x"))


FAULTS = {
    "{% for m in messages %}": r"\(line 1\): Unexpected end of template",
    "a\n{{ messages | nothing }}": r"\(line 2\): No filter named 'nothing'",
    "{% for m in messages %}\n{{ m.content + 1 }}{% endfor %}": r"\(line 2\): can only concatenate str",
    "{{ functions | tojson }}": r"\(line 1\): 'functions' is undefined",
    "{{ messages | map(attribute='role') | tojson }}": r"\(line 1\): tojson was given a generator",
    "{{ messages[0].a.b }}": r"\(line 1\): .*has no attribute 'a'",
}


@pytest.mark.parametrize("template", FAULTS)
def test_a_fault_of_the_template_is_not_the_clients(make_tokenizer, caplog, template):
    tokenizer = make_tokenizer(template)
    assert "--chat-template replaces it" in caplog.text
    for messages in (user("x"), user([{"type": "text", "text": "x"}], name="y")):
        with pytest.raises(TemplateFault, match="template of this model has a fault " + FAULTS[template]):
            encode_chat(tokenizer, messages)


@pytest.mark.parametrize("template", FAULTS)
def test_a_given_template_with_a_fault_ends_the_start(make_tokenizer, template):
    with pytest.raises(ValueError, match="^chat_template: it has a fault " + FAULTS[template]):
        make_tokenizer(None, chat_template=template)


LISTS_TOOLS = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
NEEDS_TOOLS = "{{ tools[0].function.name + ' ' }}{{ messages[0].content }}"


def test_a_template_that_needs_a_list_of_tools_gets_an_empty_one(make_tokenizer, caplog):
    tokenizer = make_tokenizer(LISTS_TOOLS)
    assert not caplog.records
    assert tokenizer.decode(encode_chat(tokenizer, user("hi"))) == "hi"
    tools = {"tools": [{"function": {"name": "look"}}]}
    assert tokenizer.decode(encode_chat(tokenizer, user("hi"), template_kwargs=tools)) == "look hi"


def test_a_template_that_needs_a_tool_fails_without_one_only(make_tokenizer, caplog):
    for given in ({}, {"chat_template": NEEDS_TOOLS}):
        tokenizer = make_tokenizer(None if given else NEEDS_TOOLS, **given)
        assert "Requests to chat without tools will fail" in caplog.text
        with pytest.raises(TemplateFault, match="has a fault"):
            encode_chat(tokenizer, user("hi"))
        tools = {"tools": [{"function": {"name": "look"}}]}
        assert tokenizer.decode(encode_chat(tokenizer, user("hi"), template_kwargs=tools)) == "look hi"
        caplog.clear()


IN_BRANCHES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content.nothing.at_all }}{% endif %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content + '' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([{"role": "system", "content": "a"}, *user("b")], TemplateFault),  # a plain conversation
        ([{"role": "tool", "content": "a"}], InvalidRequest),  # refused
        (user([{"type": "text", "text": "a"}]), InvalidRequest),  # not a text
        ([*user("a"), {"role": "system", "content": "b"}], InvalidRequest),  # roles not in turn
        ([*user("a"), {"role": "assistant", "content": "b", "tool_calls": [{}]}, *user(1)], InvalidRequest),
    ],
)
def test_whose_fault_an_error_is(make_tokenizer, caplog, messages, error):
    tokenizer = make_tokenizer(IN_BRANCHES)
    assert not caplog.records, "a user's and an assistant's turn are rendered"
    encode_chat(tokenizer, user("x"))
    with pytest.raises(error) as caught:
        encode_chat(tokenizer, messages)
    assert type(caught.value) is error


def test_a_missing_tokenizer_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="No usable tokenizer"):
        Tokenizer(tmp_path)


def test_threads_share_a_tokenizer(make_tokenizer):
    tokenizer = make_tokenizer(PROMPT)
    with ThreadPoolExecutor(4) as threads:
        texts = [f"text {index} " * 50 for index in range(64)]
        results = list(threads.map(lambda text: encode_chat(tokenizer, user(text)), texts))
    for text, ids in zip(texts, results, strict=True):
        assert tokenizer.decode(ids) == f"[user]{text}[assistant]"


async def test_the_pool_encodes_off_the_loop(make_tokenizer):
    pool = TokenizerPool(make_tokenizer(PROMPT), num_threads=2, max_model_len=100)
    [ids] = await pool.encode_batch(["hello <|end|>"])
    assert await pool.decode(ids, skip_special_tokens=False) == "hello <|end|>"
    assert pool.max_prompt_chars >= 100
    assert await pool.token_strs(ids[-3:]) == ["o", "Ġ", EOS]
    pool.close()


@pytest.mark.parametrize("num_texts", [0, 1, MAX_BATCH_TEXTS, 2 * MAX_BATCH_TEXTS + 1])
async def test_many_texts_are_encoded_in_several_jobs(make_tokenizer, monkeypatch, num_texts: int):
    tokenizer = make_tokenizer(PROMPT)
    pool = TokenizerPool(tokenizer, num_threads=2, max_model_len=100)
    texts = [f"text {number}" * (number % 7) for number in range(num_texts)]
    expected = [tokenizer.encode_batch([text])[0] for text in texts]
    hops, run = [], pool._run
    monkeypatch.setattr(pool, "_run", lambda function: hops.append(function) or run(function))
    assert await pool.encode_batch(texts) == expected
    assert len(hops) == -(-num_texts // MAX_BATCH_TEXTS)
    pool.close()


async def test_an_id_with_a_logit_but_no_token_is_no_text(make_tokenizer):
    tokenizer = make_tokenizer(PROMPT)
    pool = TokenizerPool(tokenizer, num_threads=1, max_model_len=100)
    beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 60]
    assert await pool.token_strs(beyond) == ["", ""]
    assert await pool.decode(beyond, skip_special_tokens=False) == ""
    assert pool.special_tokens == {
        "bos_token": None,
        "eos_token": EOS,
        "pad_token": None,
        "unk_token": None,
    }
    pool.close()


def test_the_real_tokenizer(smollm):
    tokenizer = Tokenizer(smollm.tokenizer_dir)
    ids = encode_chat(tokenizer, user("What is 12?"))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nWhat is 12?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.vocab_size == 49152
    for sample in ("emoji 👩‍👩‍👧 and 東京", "digits 12345  67", "e\u0301 ก็ <|im_end|>"):
        [ids] = tokenizer.encode_batch([sample])
        assert tokenizer.decode(ids, skip_special_tokens=False) == sample


def test_one_of_several_templates_is_for_tools(make_tokenizer):
    both = {"default": PROMPT, "tool_use": "{{ tools[0].name }}:" + PROMPT, "rag": "{{ documents }}"}
    tokenizer = make_tokenizer(both)
    pool = TokenizerPool(tokenizer, num_threads=1, max_model_len=100)
    assert (pool.chat_template, pool.tool_template) == (both["default"], both["tool_use"])
    pool.close()
    for kwargs, expected in (
        ({"tools": [{"name": "look"}]}, "look:[user]hi<|end|>[assistant]"),
        ({"tools": []}, "[user]hi<|end|>[assistant]"),
        ({}, "[user]hi<|end|>[assistant]"),
    ):
        ids = encode_chat(tokenizer, user("hi"), template_kwargs=kwargs)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_a_model_with_one_template_uses_it_for_tools(make_tokenizer):
    pool = TokenizerPool(make_tokenizer(PROMPT), num_threads=1, max_model_len=100)
    assert pool.tool_template == pool.chat_template == PROMPT
    pool.close()


def test_a_folder_with_a_sentencepiece_model_alone(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"] * 20),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        minloglevel=2,
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = Tokenizer(tmp_path)
    [ids] = tokenizer.encode_batch(["the fox é"], add_special_tokens=False)
    assert ids == reference.encode("the fox é")
    assert tokenizer.decode(ids) == "the fox é"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": {"type": "BPE"}, "added_tokens": [3]}'),
        ("tokenizer.json", "[]"),
        ("tokenizer.model", "no protobuf"),
    ],
)
def test_tokenizer_files_that_make_no_sense_are_one_sentence(tmp_path, name, content):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match="No usable tokenizer in") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_configuration_that_no_tokenizer_reads_is_named_with_the_reason(tmp_path):
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": "2"}))
    with pytest.raises(ModelError, match=r"config\.json is refused by .*eos_token_id.* expected int, got"):
        Tokenizer(tmp_path)
