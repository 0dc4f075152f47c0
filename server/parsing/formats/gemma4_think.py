"""<|channel>thought…<channel|>: Gemma 4."""

from server.parsing.reasoning import ReasoningParser


class Gemma4ThinkParser(ReasoningParser):
    """Reasoning between control tokens, after the name of its channel."""

    name = "gemma4"
    template_signs = ("<|channel>thought",)
    markers = ("<|channel>", "<channel|>")
    after_opener = "thought"
