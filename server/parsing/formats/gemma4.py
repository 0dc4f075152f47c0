"""Gemma 4: <|tool_call>call:f{a:<|"|>text<|"|>,b:2}<tool_call|>.

https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4
"""

from server.parsing.named_call import QuotedCallParser


class Gemma4Parser(QuotedCallParser):
    """As FunctionGemma, with other control tokens."""

    name = "gemma4"
    template_signs = ("<|tool_call>",)
    call = ("<|tool_call>", "<tool_call|>")
    quote = '<|"|>'
    result = "<|tool_response>"
    markers = (*call, quote, result)
