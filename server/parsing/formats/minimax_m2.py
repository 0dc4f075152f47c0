"""MiniMax M2: <minimax:tool_call><invoke name="f"><parameter name="a">…</parameter></invoke>….

Several calls are in one pair of markers. https://huggingface.co/MiniMaxAI/MiniMax-M2
"""

from server.parsing.tagged_call import TaggedToolParser, Tags

TAGS = Tags(
    function='<invoke name="',
    after_name='">',
    end_function="</invoke>",
    parameter='<parameter name="',
    after_key="",
    value='">',
    end_value="</parameter>",
)


class MiniMaxM2Parser(TaggedToolParser):
    """Tags with names in attributes."""

    name = "minimax_m2"
    template_signs = ("<minimax:tool_call>",)
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")
    blocks = {"<minimax:tool_call>": "</minimax:tool_call>"}  # noqa: RUF012
    tags = TAGS
    shares_block = True
