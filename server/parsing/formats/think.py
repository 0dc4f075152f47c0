"""<think>…</think>: DeepSeek R1, Qwen 3, SmolLM3, GLM 4.5 and most other models that reason."""

from server.parsing.reasoning import ReasoningParser


class ThinkParser(ReasoningParser):
    """Reasoning in <think> tags; some templates show only the closing one."""

    name = "think"
    markers = template_signs = ("<think>", "</think>")
