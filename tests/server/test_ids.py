import re

from server.ids import new_id


def test_ids_are_hexadecimal_and_differ() -> None:
    ids = [new_id() for _ in range(1000)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{32}", text) for text in ids)
