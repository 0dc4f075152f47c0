"""Apriel 1.6: reasoning and the answer after a heading each; the template writes the first."""

from server.parsing.reasoning import ReasoningParser

START = "Here are my reasoning steps:"


class AprielThinkParser(ReasoningParser):
    """Reasoning up to the heading of the answer."""

    name = "apriel"
    template_signs = (START,)
    markers = (START, "[BEGIN FINAL RESPONSE]")
