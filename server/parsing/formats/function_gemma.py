"""FunctionGemma: <start_function_call>call:f{a:<escape>text<escape>,b:2}<end_function_call>.

https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices
"""

from server.parsing.named_call import QuotedCallParser


class FunctionGemmaParser(QuotedCallParser):
    """Strings are between control tokens, and so is each call."""

    name = "function_gemma"
    template_signs = ("<start_function_call>",)
    call = ("<start_function_call>", "<end_function_call>")
    quote = "<escape>"
    result = "<start_function_response>"
    markers = (*call, quote, result)
