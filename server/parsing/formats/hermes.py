"""Hermes: <tool_call>{"name": …, "arguments": …}</tool_call>. Also Qwen 2.5, Qwen 3, Granite 4, SmolLM3.

EXAONE 4 and ERNIE 4.5 write it, too. Several calls follow one another, each between its own markers, or as a
list between one pair.
https://github.com/NousResearch/Hermes-Function-Calling
"""

from server.parsing.marked_json import MarkedJsonParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(MarkedJsonParser):
    """One block for each call. Forced calls of formats without a grammar are written like this, too."""

    name = "hermes"
    template_signs = (OPEN,)
    markers = (OPEN, CLOSE)
    blocks = {OPEN: CLOSE}  # noqa: RUF012
    inside = ("\n", "\n", "\n")
    shares_block = False
    ends = "<"
