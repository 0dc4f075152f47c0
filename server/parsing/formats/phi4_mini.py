"""Phi-4-mini: <|tool_call|>[{"name": …, "arguments": …}, …]<|/tool_call|>, or functools[…].

https://huggingface.co/microsoft/Phi-4-mini-instruct
"""

from server.parsing.marked_json import MarkedJsonParser

OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"


class Phi4MiniParser(MarkedJsonParser):
    """A list between markers, or after a word of plain text."""

    name = "phi4_mini"
    template_signs = ("<|/tool|>", CLOSE, "functools[")
    markers = (OPEN, CLOSE)
    blocks = {OPEN: CLOSE, "functools": ""}  # noqa: RUF012
