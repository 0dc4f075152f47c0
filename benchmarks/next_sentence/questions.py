"""A task of lm-eval without a download: which of four sentences of data/alice.txt follows those before it."""

import re
from pathlib import Path
from typing import Any

TEXT = Path(__file__).parents[1] / "data" / "alice.txt"
NUM_QUESTIONS = 100
SENTENCES_BEFORE = 6
LEAST_WORDS = 5


def questions(text: str) -> list[dict[str, Any]]:
    """Return NUM_QUESTIONS of {text, choices, label}; wrong choices are far away in the text."""
    sentences = re.split(r"(?<=[.!?]['\")])\s+|(?<=[.!?])\s+", text.replace("\n\n", " ").strip())
    known = [
        index
        for index, sentence in enumerate(sentences)
        if index >= SENTENCES_BEFORE and len(sentence.split()) >= LEAST_WORDS
    ]
    found = []
    for number in range(NUM_QUESTIONS):
        place = number * len(known) // NUM_QUESTIONS
        label = number % 4
        # In turn from this place and those a quarter, a half and three quarters of the text later.
        others = [known[(place + shift * len(known) // 4) % len(known)] for shift in range(4)]
        choices = [sentences[others[(choice - label) % 4]] for choice in range(4)]
        before = " ".join(sentences[known[place] - SENTENCES_BEFORE : known[place]])
        found.append({"text": before, "choices": choices, "label": label})
    return found


def dataset(**_: Any) -> dict[str, Any]:
    """Return the task's data, as lm-eval's `custom_dataset` wants it."""
    from datasets import Dataset  # which comes with lm-eval

    return {"test": Dataset.from_list(questions(TEXT.read_text("utf-8")))}
