"""<|START_THINKING|>…<|END_THINKING|>: Command R7B and Command A Reasoning.

The answer is between markers of its own, with reasoning or without.
"""

from server.parsing.reasoning import ReasoningParser


class CohereThinkParser(ReasoningParser):
    """Reasoning between control tokens."""

    name = "cohere"
    markers = template_signs = ("<|START_THINKING|>", "<|END_THINKING|>")
    answer_markers = {  # noqa: RUF012
        "<|START_RESPONSE|>": "<|END_RESPONSE|>",
        "<|START_TEXT|>": "<|END_TEXT|>",
    }
    marks_every_answer = True
