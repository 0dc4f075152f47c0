"""<think>…</think><response>…</response>: Granite 3.3, ERNIE 4.5. Hunyuan A13B has <answer> instead."""

import re

from server.parsing.reasoning import ReasoningParser

# Other templates have such tags around the results of tools.
AFTER_REASONING = re.compile(r"</think>(?:\\n|[\s'\"+~])*<(?:response|answer)>|split\(['\"]<answer>")


class ThinkResponseParser(ReasoningParser):
    """Reasoning in tags, and the answer after it in tags as well, which are no part of it."""

    name = "think_response"
    template_signs = ("<response></response>",)
    markers = ("<think>", "</think>")
    answer_markers = {"<response>": "</response>", "<answer>": "</answer>"}  # noqa: RUF012

    @classmethod
    def is_shown_by(cls, template: str) -> bool:
        """See Parser."""
        return super().is_shown_by(template) or AFTER_REASONING.search(template) is not None
