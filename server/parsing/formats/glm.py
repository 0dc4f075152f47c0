"""GLM 4.5 to 4.7: <tool_call>f, then <arg_key>a</arg_key><arg_value>…</arg_value> for each argument.

https://huggingface.co/zai-org/GLM-4.5
"""

from server.parsing.tagged_call import TaggedToolParser, Tags

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class GlmParser(TaggedToolParser):
    """Pairs of keys and values after the name."""

    name = "glm45"
    template_signs = ("<arg_key>",)
    markers = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    blocks = {OPEN: CLOSE}  # noqa: RUF012
    tags = Tags(
        function="",
        after_name="",
        end_function="",
        parameter="<arg_key>",
        after_key="</arg_key>",
        value="<arg_value>",
        end_value="</arg_value>",
    )
