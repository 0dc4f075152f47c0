"""POST /v1/embeddings: request and response."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, WithJsonSchema
from pydantic.functional_validators import PlainValidator

from server.schema.completions import PROMPT_SCHEMA, Prompt, check_prompts
from server.schema.foreign import ONE
from server.schema.refused_fields import Refused
from server.schema.wire import ModelRequest, Wire

INPUT_ONLY = Refused((), "send input")
SHORTEN = Refused((), "shorten the input before sending it")


class EmbeddingsRequest(ModelRequest):
    """Body of POST /v1/embeddings."""

    DIALECT = "embeddings"
    HINT = "nothing is generated here"
    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "messages": INPUT_ONLY,
        "prompt": INPUT_ONLY,
        "inputs": INPUT_ONLY,
        "input_ids": Refused((), "send token ids as input"),
        "instructions": Refused(("",), "write them in front of the input"),
        "system": Refused(("",), "write it in front of the input"),
        "stream": Refused((False,), "an embedding comes as a whole"),
        "n": ONE,
        "normalize": Refused((True,), "vectors have the length 1"),
        "embed_dtype": Refused(("float32",)),
        "endianness": Refused(("native", "little")),
        "pooling": Refused((), "it is a setting of the server"),
        "input_type": Refused((), "write what the model expects in front of the text"),
        "priority": Refused((0,), "inputs are served in the order they come"),
        "truncate": SHORTEN,
        "truncate_prompt_tokens": SHORTEN,
    }

    input: Annotated[tuple[Prompt, ...], PlainValidator(check_prompts), WithJsonSchema(PROMPT_SCHEMA)]
    encoding_format: Annotated[Literal["float", "base64"] | None, Wire(neutral=("float",))] = Field(
        None, description="numbers, or their little-endian float32 bytes in base64; default float"
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="keep the first N numbers, scaled to length 1 again; default: all",
    )
    add_special_tokens: bool | None = Field(
        None,
        description="let the tokenizer add its special tokens (such as BOS) to text inputs; default true",
    )
    cache_prompt: bool | None = Field(
        None, description="use the prefix cache, and leave the prompt in it; default true"
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="share cached prefixes only among requests with this salt",
    )


class Embedding(BaseModel):
    """The vector of one input, of length 1."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(BaseModel):
    """Token counts of all inputs together."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """Answer of POST /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
