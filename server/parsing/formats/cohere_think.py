"""<|START_THINKING|>…<|END_THINKING|>: Command R7B and Command A Reasoning.

The markers around the answer that follows are control tokens, which are never shown.
"""

from server.parsing.reasoning import ReasoningParser


class CohereThinkParser(ReasoningParser):
    """Reasoning between control tokens."""

    name = "cohere"
    markers = template_signs = ("<|START_THINKING|>", "<|END_THINKING|>")
