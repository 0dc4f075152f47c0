"""<think>…</think><response>…</response>: Granite 3.3, ERNIE 4.5. Hunyuan A13B has <answer> instead."""

from server.parsing.reasoning import ReasoningParser


class ThinkResponseParser(ReasoningParser):
    """Reasoning in tags, and the answer after it in tags as well, which are no part of it."""

    name = "think_response"
    template_signs = ("<response>", "<answer>")
    markers = ("<think>", "</think>")
    answer_markers = {"<response>": "</response>", "<answer>": "</answer>"}  # noqa: RUF012
