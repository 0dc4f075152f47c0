"""<mm:think>…</mm:think>: MiniMax M3, which begins an answer without reasoning with the closing tag."""

from server.parsing.reasoning import ReasoningParser


class MiniMaxThinkParser(ReasoningParser):
    """Reasoning in tags with a prefix."""

    name = "minimax_m3"
    markers = template_signs = ("<mm:think>", "</mm:think>")
