"""[THINK]…[/THINK]: Magistral and later models of Mistral."""

from server.parsing.reasoning import ReasoningParser


class MistralThinkParser(ReasoningParser):
    """Reasoning in [THINK] markers."""

    name = "mistral"
    template_signs = ("[THINK]",)
    markers = ("[THINK]", "[/THINK]")
