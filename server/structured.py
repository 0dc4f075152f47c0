"""Fields that constrain the output, of several APIs -> the engine's Grammar."""

from dataclasses import replace

import orjson

from engine.errors import InvalidRequest
from engine.request import Grammar, GrammarKind
from server.schema.structured import (
    ResponseFormat,
    Source,
    Structured,
    StructuredOutputs,
    TypedGrammar,
)


def grammar_of(wire: Structured) -> Grammar | None:
    """Return the grammar of the output; None for free text. Raises InvalidRequest if there are several."""
    found = [*_from_format(wire), *_from_options(wire), *_from_fields(wire)]
    if len(found) > 1:
        first, second = (grammar.param for grammar in found[:2])
        raise InvalidRequest(
            f"{first} and {second} both say what the output must be; send one of them.", second
        )
    return found[0] if found else None


def _from_format(wire: Structured) -> list[Grammar]:
    chosen: ResponseFormat | None = wire.response_format
    if chosen is None or chosen.type == "text":
        return []
    param = "response_format"
    if chosen.type == "json_object":
        return [_json(chosen.schema_, param) if chosen.schema_ else Grammar("json_object", param=param)]
    assert chosen.json_schema is not None
    name = chosen.json_schema.name
    label = f"schema for response_format '{name}'" if name else f"schema for {param}"
    return [_json(chosen.json_schema.schema_, param, label=label)]


def _from_options(wire: Structured) -> list[Grammar]:
    options: StructuredOutputs | None = wire.structured_outputs
    if options is None:
        return []
    whitespace = "" if options.disable_any_whitespace else options.whitespace_pattern
    found = _guided(
        "structured_outputs.",
        json=options.json_,
        json_object=options.json_object,
        regex=options.regex,
        choice=options.choice,
        grammar=options.grammar,
        whitespace=whitespace,
    )
    closes = options.disable_additional_properties
    return found if closes is None else [replace(grammar, closes_objects=closes) for grammar in found]


def _from_fields(wire: Structured) -> list[Grammar]:
    whitespace = wire.guided_whitespace_pattern
    found = _guided(
        "guided_",
        json=wire.guided_json,
        json_object=wire.guided_json_object,
        regex=wire.guided_regex,
        choice=wire.guided_choice,
        grammar=wire.guided_grammar,
        whitespace=whitespace,
    )
    if wire.regex is not None:
        found.append(_grammar("regex", wire.regex, "regex"))
    if wire.ebnf is not None:
        found.append(_grammar("ebnf", wire.ebnf, "ebnf"))
    if wire.json_schema is not None:
        found.append(_json(wire.json_schema, "json_schema", whitespace))
    if wire.json_object:
        found.append(Grammar("json_object", whitespace=whitespace, param="json_object"))
    if wire.format == "json":
        found.append(Grammar("json_object", whitespace=whitespace, param="format"))
    elif wire.format:
        found.append(_json(wire.format, "format", whitespace))
    param = "grammar"
    if isinstance(wire.grammar, TypedGrammar):
        found.append(_typed(wire.grammar, param))
    elif wire.grammar:
        found.append(_grammar("ebnf", wire.grammar, param))
    return found


def _guided(
    prefix: str,
    *,
    json: Source | None,
    json_object: bool | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    whitespace: str | None,
) -> list[Grammar]:
    """Return the grammars of the five kinds that vLLM names, in its old or new fields."""
    found = []
    if json is not None:
        found.append(_json(json, f"{prefix}json", whitespace))
    if json_object:
        found.append(Grammar("json_object", whitespace=whitespace, param=f"{prefix}json_object"))
    if regex is not None:
        found.append(_grammar("regex", regex, f"{prefix}regex"))
    if choice is not None:
        found.append(_grammar("choice", orjson.dumps(choice).decode(), f"{prefix}choice"))
    if grammar is not None:
        found.append(_grammar("ebnf", grammar, f"{prefix}grammar"))
    return found


def _typed(grammar: TypedGrammar, param: str) -> Grammar:
    value = grammar.value
    if grammar.type == "regex":
        return _grammar("regex", str(value), param)
    if grammar.type == "json_schema" and isinstance(value, dict):  # with its name around it
        value = value.get("schema", value)
    return _json(value, param)


def _grammar(kind: GrammarKind, source: str, param: str) -> Grammar:
    return Grammar(kind, source, param=param, label=param)


def _json(schema: Source | None, param: str, whitespace: str | None = None, *, label: str = "") -> Grammar:
    """Return the grammar of a schema. Raises InvalidRequest for one that cannot be written as JSON."""
    label = label or f"schema for {param}"
    if not isinstance(schema, str):
        try:
            schema = orjson.dumps(schema).decode()
        except TypeError as error:
            raise InvalidRequest(f"Invalid {label}: {error}", param) from None
    return Grammar("json_schema", schema, whitespace, param=param, label=label)
