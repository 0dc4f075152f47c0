"""Command R7B and A: <|START_ACTION|>[{"tool_name": …, "parameters": …}, …]<|END_ACTION|>.

Command R and R+ write the list in a block of Markdown after `Action:`.
https://huggingface.co/CohereLabs/c4ai-command-r7b-12-2024
"""

from server.parsing.marked_json import MarkedJsonParser

OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
ACTIONS = ("Action:\n```json", "Action: ```json", "Action:```json")


class CohereParser(MarkedJsonParser):
    """A list with names of its own for the keys."""

    name = "cohere"
    template_signs = (OPEN, *ACTIONS, "Action:\\n```json")
    markers = (OPEN, CLOSE)
    blocks = {OPEN: CLOSE, **dict.fromkeys(ACTIONS, "```")}  # noqa: RUF012
    keys = ("tool_name", "parameters")
