"""Granite 3: <|tool_call|>[{"name": …, "arguments": …}, …]. Granite 20B FC writes <function_call> before it.

https://huggingface.co/ibm-granite/granite-3.3-8b-instruct
"""

from server.parsing.marked_json import MarkedJsonParser


class GraniteParser(MarkedJsonParser):
    """A list after a marker; nothing closes it."""

    name = "granite"
    template_signs = ("<|tool_call|>", "<function_call>")
    markers = ("<|tool_call|>", "<function_call>")
    blocks = {"<|tool_call|>": "", "<function_call>": ""}  # noqa: RUF012
