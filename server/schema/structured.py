"""Fields that constrain the output: OpenAI's response_format, and those of other servers."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from server.schema.wire import TypedRequest, Wire, WireRequest

MAX_CHOICES = 4096
Source = str | dict[str, Any]
WHITESPACE = "regular expression of the whitespace between the tokens of JSON"


class JsonSchemaFormat(WireRequest):
    """A schema and its name. It is always obeyed to the letter, `strict` or not."""

    name: str | None = Field(None, max_length=512)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(TypedRequest):
    """The form of the answer. A schema beside json_object counts, too, as in llama.cpp."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @field_validator("json_schema")
    @classmethod
    def check_schema(cls, value: JsonSchemaFormat | None, info: ValidationInfo) -> JsonSchemaFormat | None:
        """Check that there is a schema if the type needs one."""
        if info.data.get("type") == "json_schema" and (value is None or value.schema_ is None):
            raise PydanticCustomError("missing", "the type json_schema needs json_schema.schema")
        return value


class StructuredOutputs(WireRequest):
    """The field of vLLM; one of these."""

    json_: Source | None = Field(None, alias="json", description="JSON schema, also as a string")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = Field(None, description="in GBNF or Lark syntax")
    json_object: bool | None = None
    structural_tag: None = Field(None, description="not supported")
    whitespace_pattern: str | None = Field(None, description=WHITESPACE)
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = Field(
        None,
        description="whether objects that list properties have no others if the schema does not mention "
        "additionalProperties; default: the server's setting",
    )


class TypedGrammar(WireRequest):
    """The field of TGI."""

    type: Literal["json", "json_schema", "regex"]
    value: Source = Field(description="JSON schema, or expression")

    @field_validator("value")
    @classmethod
    def check_value(cls, value: Source, info: ValidationInfo) -> Source:
        """Refuse an expression that is not a string."""
        if info.data.get("type") == "regex" and not isinstance(value, str):
            raise ValueError("the value of a regex must be a string")
        return value


class Structured(WireRequest):
    """Fields that constrain the whole output. At most one of them can be used."""

    response_format: Annotated[ResponseFormat | None, Wire(neutral=({"type": "text"},))] = Field(
        None, description="free text, any JSON object, or JSON that a schema describes"
    )
    structured_outputs: Annotated[StructuredOutputs | None, Wire(neutral=({},))] = None
    guided_json: Source | None = Field(None, description="JSON schema, also as a string")
    guided_json_object: Annotated[bool | None, Wire(neutral=(False,))] = Field(
        None, description="any JSON object; default false"
    )
    guided_regex: str | None = Field(None, description="expression that the whole output matches")
    guided_choice: list[str] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES, description="the output is one of these"
    )
    guided_grammar: str | None = Field(None, description="grammar in GBNF or Lark syntax")
    guided_whitespace_pattern: str | None = Field(None, description=WHITESPACE)
    regex: str | None = Field(None, description="another name of guided_regex")
    ebnf: str | None = Field(None, description="another name of guided_grammar")
    json_schema: Source | None = Field(None, description="another name of guided_json")
    json_object: Annotated[bool | None, Wire(neutral=(False,))] = Field(
        None, description="another name of guided_json_object"
    )
    format: Annotated[Source | None, Wire(neutral=("", {}))] = Field(
        None, description='"json" for any JSON object, or a JSON schema'
    )
    grammar: Annotated[str | TypedGrammar | None, Wire(neutral=("",))] = Field(
        None, description="grammar in GBNF or Lark syntax, or, with a type, a schema or an expression"
    )
