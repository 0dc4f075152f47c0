"""A chat template from a file: read, refused when it is none, and used instead of the model's own."""

import pytest

from engine.config import EngineConfig
from engine.startup import load, load_tokenizer
from engine.text.chat_template import read_template
from engine.text.tokenizer import TokenizerPool
from tests.engine.test_tokenizer import PROMPT, user

OTHER = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_a_file_is_read_as_it_is(tmp_path):
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
async def test_a_file_that_is_no_template_is_told_with_the_setting(tmp_path, content, problem):
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
    assert tokenizer.decode(tokenizer.encode_chat(user("hello"))) == "<user>hello"
