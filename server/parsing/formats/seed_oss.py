"""Seed-OSS: <seed:tool_call><function=f><parameter=a>…</parameter></function></seed:tool_call>.

https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct
"""

from server.parsing.formats.qwen_coder import TAGS
from server.parsing.tagged_call import TaggedToolParser


class SeedParser(TaggedToolParser):
    """The tags of Qwen3-Coder, whose values begin and end at the tags."""

    name = "seed_oss"
    template_signs = ("<seed:tool_call>",)
    markers = ("<seed:tool_call>", "</seed:tool_call>")
    blocks = {"<seed:tool_call>": "</seed:tool_call>"}  # noqa: RUF012
    tags = TAGS._replace(newline="")
