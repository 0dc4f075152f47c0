"""MiniMax M1: <tool_calls>, one {"name": …, "arguments": …} a line, </tool_calls>. Also Hunyuan and Jamba.

Hunyuan A13B and Jamba write a list there. https://huggingface.co/MiniMaxAI/MiniMax-M1-80k
"""

from server.parsing.marked_json import MarkedJsonParser

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"


class MiniMaxParser(MarkedJsonParser):
    """Lines between markers."""

    name = "minimax"
    template_signs = (OPEN,)
    markers = (OPEN, CLOSE)
    blocks = {OPEN: CLOSE}  # noqa: RUF012
    inside = ("\n", "\n", "\n")
    ends = "<"
