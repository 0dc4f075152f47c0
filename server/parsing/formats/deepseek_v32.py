"""DeepSeek V3.2 and V4: <｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">…, in a block.

The attribute `string` says if a value is text or JSON. Only a part of each tag is a control token.
https://huggingface.co/deepseek-ai/DeepSeek-V3.2
"""

from collections.abc import Mapping

from server.parsing.tagged_call import TaggedToolParser, Tags

DSML = "｜DSML｜"


class DeepSeekV32Parser(TaggedToolParser):
    """Tags with names and types in attributes."""

    name = "deepseek_v32"
    template_signs = (DSML,)
    markers = (DSML,)
    blocks = {  # noqa: RUF012
        f"<{DSML}function_calls>": f"</{DSML}function_calls>",
        f"<{DSML}tool_calls>": f"</{DSML}tool_calls>",
    }
    tags = Tags(
        function=f'<{DSML}invoke name="',
        after_name='">',
        end_function=f"</{DSML}invoke>",
        parameter=f'<{DSML}parameter name="',
        after_key="",
        value='">',
        end_value=f"</{DSML}parameter>",
    )

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> None:
        """See ToolParser; there is no grammar of text that ends in a tag with a control token inside."""
