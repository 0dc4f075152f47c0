"""System messages for templates that render one, as the first."""

import pytest

from server.parsing.system_turns import merge_system_turns


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([], []),
        (["user a"], ["user a"]),
        (["system a", "developer b", "user c"], ["system a\n\nb", "user c"]),
        (["system ", "system b"], ["system b"]),
        (["user a", "system b"], ["user a\n\nb"]),
        (["user a", "system b", "developer c", "user d"], ["user a\n\nb\n\nc", "user d"]),
        (["user a", "assistant b", "system c"], ["user a", "assistant b", "user c"]),
        (
            ["user a", "assistant b", "system c", "system d", "user e", "user f"],
            ["user a", "assistant b", "user c\n\nd\n\ne", "user f"],
        ),
        (["tool a", "system b", "assistant c"], ["tool a\n\nb", "assistant c"]),
        (["assistant a", "system b", "assistant c"], ["assistant a", "user b", "assistant c"]),
    ],
)
def test_system_messages_join_the_first_or_the_users(turns: list[str], expected: list[str]) -> None:
    def parsed(lines: list[str]) -> list[dict[str, str]]:
        return [
            {"role": role, "content": content, "name": "n"}
            for role, _, content in (line.partition(" ") for line in lines)
        ]

    given = parsed(turns)
    merged = merge_system_turns(given)
    assert [(turn["role"], turn["content"]) for turn in merged] == [
        (turn["role"], turn["content"]) for turn in parsed(expected)
    ]
    assert given == parsed(turns)
