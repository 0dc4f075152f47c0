"""Qwen3-Coder, Qwen 3.5: <tool_call><function=f><parameter=a>…</parameter></function></tool_call>.

https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct
"""

from server.parsing.tagged_call import TaggedToolParser, Tags

TAGS = Tags(
    function="<function=",
    after_name=">",
    end_function="</function>",
    parameter="<parameter=",
    after_key="",
    value=">",
    end_value="</parameter>",
    newline="\n",
)


class QwenCoderParser(TaggedToolParser):
    """Tags of functions and parameters; newlines separate values from their tags."""

    name = "qwen3_coder"
    template_signs = (TAGS.parameter,)
    markers = ("<tool_call>", "</tool_call>")
    blocks = {"<tool_call>": "</tool_call>"}  # noqa: RUF012
    tags = TAGS
