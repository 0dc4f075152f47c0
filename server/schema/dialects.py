"""What each dialect of the API refuses: every field that is known anywhere and that it does not have itself.

What is known is drawn from the schemas: what a request of any kind declares, what one refuses in words of its
own, and what other servers call the same. A field that acts in one dialect is never ignored in another.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from server.schema import anthropic, chat, completions, embeddings, generate_parameters, responses, tokenize
from server.schema.aliases import NO_LIMIT, OTHER_NAMES
from server.schema.refused_fields import FOREIGN, NEUTRAL, NO_OPS, PROMPT_FIELDS, Refused
from server.schema.sampling import WireRequest


class Dialect(NamedTuple):
    """One kind of request: what hints call it, its schema, and the fields it has a word about itself.

    `hint` says what is the matter with the fields of others; by default, whose they are.
    """

    name: str
    request: type[WireRequest]
    refused: Mapping[str, Refused]
    hint: str = ""


CHAT_DIALECT = Dialect("chat", chat.ChatRequest, chat.REFUSED)
COMPLETION_DIALECT = Dialect("completions", completions.CompletionRequest, completions.REFUSED)
RESPONSES_DIALECT = Dialect("responses", responses.ResponsesRequest, responses.REFUSED)
MESSAGES_DIALECT = Dialect("messages", anthropic.MessagesRequest, anthropic.REFUSED)
GENERATE_DIALECT = Dialect("/generate", generate_parameters.GenerateParameters, generate_parameters.REFUSED)
EMBEDDINGS_DIALECT = Dialect(
    "embeddings", embeddings.EmbeddingsRequest, embeddings.REFUSED, "nothing is generated here"
)
TOKENIZE_DIALECT = Dialect("/tokenize", tokenize.TokenizeRequest, tokenize.REFUSED)
DIALECTS = (
    CHAT_DIALECT,
    COMPLETION_DIALECT,
    RESPONSES_DIALECT,
    MESSAGES_DIALECT,
    GENERATE_DIALECT,
    EMBEDDINGS_DIALECT,
    TOKENIZE_DIALECT,
    Dialect("/detokenize", tokenize.DetokenizeRequest, {}),
    Dialect("/tokens", tokenize.TokensRequest, tokenize.REFUSED_TOKENS),
)

# What is not quite the same as a field, and what to look at instead.
NEAR = {
    "max_length": "max_tokens",
    "min_length": "min_tokens",
    "text": "response_format",
    "output_config": "response_format",
    "output_format": "response_format",
    "regular_constraint": "guided_regex",
}


def known_fields() -> dict[str, Refused]:
    """Every field that some dialect declares or refuses, and what is said where it does not act."""
    owners: dict[str, list[str]] = {}
    known: dict[str, Refused] = {}
    for dialect in DIALECTS:
        for name in dialect.request.model_fields:
            owners.setdefault(name, []).append(dialect.name)
        for name, refused in dialect.refused.items():
            known.setdefault(name, refused)
    for name, names in owners.items():
        known[name] = Refused(NEUTRAL.get(name, ()), f"it is a field of {listed(names)}")
    return {name: refused for name, refused in (known | FOREIGN).items() if name not in NO_OPS}


def listed(names: Iterable[str]) -> str:
    """Names in a sentence."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


KNOWN = known_fields()


def refused_by(dialect: Dialect) -> dict[str, Refused]:
    """All known fields that a dialect does not take under any name, and what it refuses itself."""
    taken = {*dialect.request.model_fields, *dialect.request.OTHER_NAMES}
    refused = {name: field for name, field in KNOWN.items() if name not in taken}
    if dialect.hint:
        others = refused.keys() - FOREIGN.keys()
        refused |= {name: Refused(refused[name].neutral, dialect.hint) for name in others}
    refused |= dialect.refused
    for name, field in (OTHER_NAMES | NEAR).items():
        if not (name in taken or name in FOREIGN or name in dialect.refused):
            words = refused[field].hint if field in refused else f"use {field}"
            neutral = NEUTRAL.get(name, NEUTRAL.get(field, ()))
            refused[name] = Refused(neutral + ((-1,) if name in NO_LIMIT else ()), words)
    return refused


def shaping(table: Mapping[str, Refused]) -> dict[str, Refused]:
    """The fields that could change the tokens of a prompt."""
    return {name: refused for name, refused in table.items() if name in PROMPT_FIELDS}


CHAT = refused_by(CHAT_DIALECT)
COMPLETION = refused_by(COMPLETION_DIALECT)
RESPONSES = refused_by(RESPONSES_DIALECT)
MESSAGES = refused_by(MESSAGES_DIALECT)
PARAMETERS = refused_by(GENERATE_DIALECT)
EMBEDDINGS = refused_by(EMBEDDINGS_DIALECT)
TOKENIZE = shaping(refused_by(TOKENIZE_DIALECT))
COUNT_TOKENS = shaping(MESSAGES)
