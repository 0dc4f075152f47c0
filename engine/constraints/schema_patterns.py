"""Equal expressions for those that llguidance cannot read, and what is done about formats of strings."""

from typing import Any

# Of JSON Schema: a format that llguidance does not know is refused. All others are annotations.
STANDARD_FORMATS = frozenset(
    (
        *("date", "date-time", "duration", "time"),
        *("email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "uuid"),
        *("iri", "iri-reference", "uri", "uri-reference", "uri-template"),
        *("json-pointer", "regex", "relative-json-pointer"),
    )
)
# Formats with any number of digits: the longest text that is needed, with nanoseconds and an offset.
MAX_LENGTHS = {"date-time": 35, "duration": 40, "time": 24}
# Patterns that bound their digits as libraries read them: nanoseconds, and 10 digits of a duration's number.
# The format itself is enforced, too.
FRACTION = r"(\.\d{1,9})?([Zz]|[+-][\d:]{5})$"
DIGITS = {
    "date-time": rf"^.{{19}}{FRACTION}",
    "duration": r"^[PT]{1,2}(\d{1,10}([.,]\d{1,9})?[A-Z]T?)+$",
    "time": rf"^[\d:]{{8}}{FRACTION}",
}
UUID = "^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{}[0-9a-fA-F]{{3}}-[89abAB][0-9a-fA-F]{{3}}-[0-9a-fA-F]{{12}}$"
UUID_PATTERNS = {f"uuid{version}": UUID.format(version) for version in range(1, 9)}  # pydantic

TIME = r"T(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|\d+([.,]\d+)?S)"
EMOJI = r"[\p{Extended_Pictographic}\p{Emoji_Component}]*"
LABELS = (
    r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*"
)
# Patterns with look-around that libraries write for their own types, and what matches the same texts without.
KNOWN_PATTERNS: dict[str, dict[str, Any]] = {
    # pydantic, Decimal
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": {"pattern": r"^[+-]?(\d+\.?\d*|\.\d+)$"},
    # zod, email
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": {
        "pattern": r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]"
        r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    },
    # zod, hostname; without the dot that may follow 253 characters
    rf"^(?=.{{1,253}}\.?$){LABELS}\.?$": {"pattern": f"^{LABELS}$", "maxLength": 253},
    # zod, duration
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": {
        "pattern": rf"^P(\d+W|\d+Y(\d+M)?(\d+D)?({TIME})?|\d+M(\d+D)?({TIME})?|\d+D({TIME})?|{TIME})$"
    },
    # zod, emoji
    r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])"
    r"[\p{Extended_Pictographic}\p{Emoji_Component}]+$": {
        "pattern": rf"^{EMOJI}[\p{{Extended_Pictographic}}\p{{Regional_Indicator}}\u20E3]{EMOJI}$"
    },
}


def readable_strings(node: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with its pattern and format as llguidance reads them.

    Formats that JSON Schema does not know are annotations: they are dropped, but versions of UUID, which
    have a pattern. A format without a longest text gets one, and a pattern that bounds its digits if there
    is no other pattern.
    """
    found = dict(node)
    form, pattern = found.get("format"), found.get("pattern")
    if isinstance(pattern, str) and (known := KNOWN_PATTERNS.get(pattern)):
        found["pattern"] = known["pattern"]
        limit_length(found, known.get("maxLength"))
    if isinstance(form, str) and form not in STANDARD_FORMATS:
        del found["format"]
        if form in UUID_PATTERNS and found.get("type") == "string":
            found.setdefault("pattern", UUID_PATTERNS[form])
    if isinstance(form, str) and found.get("minLength", 0) in range(MAX_LENGTHS.get(form, 0)):
        limit_length(found, MAX_LENGTHS[form])
        found.setdefault("pattern", DIGITS[form])
    return found


def limit_length(node: dict[str, Any], most: int | None) -> None:
    """Let the texts of a schema be at most that long, if they have no shorter limit."""
    limit = node.get("maxLength")
    if most is not None and not (isinstance(limit, int | float) and limit <= most):
        node["maxLength"] = most
