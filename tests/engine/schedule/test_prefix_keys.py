"""Prefix hits of prompts that have content in place of placeholder tokens."""

import pytest

from engine.errors import InvalidRequest
from engine.request import PromptSpan, Request, SamplingParams
from engine.schedule import prefix_keys
from tests.engine.driver import Driver

PLACEHOLDER = 9
PROMPT = [1, 2, 3, 4, 5, 6, *[PLACEHOLDER] * 7, 1, 2, 3, 4, 5, 6, 7]


def image(name: str, start: int = 6, end: int = 13, kind: str = "image") -> tuple[PromptSpan, ...]:
    return (PromptSpan(start, end, kind, name.encode()),)


def num_cached(driver: Driver, prompt: list[int], spans: tuple[PromptSpan, ...]) -> int:
    sequence = driver.add(prompt, max_tokens=1, spans=spans)
    driver.run()
    return sequence.num_cached_tokens


def test_pages_are_shared_only_where_the_content_is_equal():
    driver = Driver.of(page_size=4)
    assert num_cached(driver, PROMPT, image("a")) == 0
    assert num_cached(driver, PROMPT, image("a")) == 16
    assert num_cached(driver, PROMPT, image("b")) == 4, "only the page before the image"
    assert num_cached(driver, PROMPT, image("a", kind="audio")) == 4
    assert num_cached(driver, PROMPT, ()) == 4, "text that looks like a placeholder is not the image"
    assert num_cached(driver, PROMPT, image("b")) == 16


def test_a_span_within_a_page_changes_its_key():
    driver = Driver.of(page_size=4)
    prompt = [1, PLACEHOLDER, 3, 4, 5, 6, 7, 8, 9]
    assert num_cached(driver, prompt, image("a", 1, 2)) == 0
    assert num_cached(driver, prompt, image("b", 1, 2)) == 0
    assert num_cached(driver, prompt, image("a", 1, 2)) == 8


def test_numbers_of_contents_are_bounded_and_never_used_twice(monkeypatch):
    monkeypatch.setattr(prefix_keys, "MAX_CONTENTS", 3)
    driver = Driver.of(page_size=4)
    for name in "abcd":
        assert num_cached(driver, PROMPT, image(name)) in (0, 4)
    assert num_cached(driver, PROMPT, image("d")) == 16
    assert num_cached(driver, PROMPT, image("a")) == 4, "dropped, and not mistaken for other content"


def test_the_key_of_a_text_prompt_is_its_token_ids():
    driver = Driver.of()
    sequence = driver.add(PROMPT)
    assert prefix_keys.PrefixKeys().key(sequence) is sequence.token_ids


@pytest.mark.parametrize(
    "spans", [[(3, 3)], [(4, 2)], [(18, 21)], [(-1, 2)], [(0, 4), (3, 5)], [(5, 7), (1, 3)]]
)
def test_spans_outside_the_prompt_are_refused(spans):
    content = tuple(PromptSpan(start, end, "image", b"x") for start, end in spans)
    with pytest.raises(InvalidRequest, match="spans"):
        Request("r", tuple(PROMPT), SamplingParams(max_tokens=1), spans=content).check(100)
