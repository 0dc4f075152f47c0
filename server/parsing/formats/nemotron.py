"""Nemotron Nano 2: <TOOLCALL>[{"name": …, "arguments": …}, …]</TOOLCALL>.

https://huggingface.co/nvidia/NVIDIA-Nemotron-Nano-9B-v2
"""

from server.parsing.marked_json import MarkedJsonParser

OPEN, CLOSE = "<TOOLCALL>", "</TOOLCALL>"


class NemotronParser(MarkedJsonParser):
    """A list between markers."""

    name = "nemotron"
    template_signs = (OPEN,)
    markers = (OPEN, CLOSE)
    blocks = {OPEN: CLOSE}  # noqa: RUF012
