"""InternLM 2 and 3: <|action_start|><|plugin|>{"name": …, "parameters": …}<|action_end|>.

https://huggingface.co/internlm/internlm2_5-7b-chat
"""

from server.parsing.marked_json import MarkedJsonParser

START, PLUGIN, END = "<|action_start|>", "<|plugin|>", "<|action_end|>"


class InternLMParser(MarkedJsonParser):
    """An object between markers, the first of which are two tokens."""

    name = "internlm"
    template_signs = (PLUGIN,)
    markers = (START, PLUGIN, END)
    blocks = {START + PLUGIN: END, f"{START} {PLUGIN}": END}  # noqa: RUF012
    inside = ("\n", "\n", "\n")
    shares_block = False
    keys = ("name", "parameters")
