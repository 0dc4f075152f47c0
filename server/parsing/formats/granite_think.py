"""Granite 3.2: reasoning and the answer after a sentence each."""

from server.parsing.reasoning import ReasoningParser


class GraniteThinkParser(ReasoningParser):
    """Reasoning between sentences that the template's system message dictates."""

    name = "granite"
    markers = template_signs = ("Here is my thought process:", "Here is my response:")
