"""POST /v1/embeddings: request and response."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from server.schema.inputs import InputsRequest
from server.schema.refused_fields import Refused
from server.schema.wire import Wire


class EmbeddingsRequest(InputsRequest):
    """Body of POST /v1/embeddings."""

    DIALECT = "embeddings"
    REFUSED: ClassVar[Mapping[str, Refused]] = {
        **InputsRequest.REFUSED,
        "input_ids": Refused((), "send token ids as input"),
        "stream": Refused((False,), "an embedding comes as a whole"),
        "normalize": Refused((True,), "vectors have the length 1"),
        "embed_dtype": Refused(("float32",)),
        "endianness": Refused(("native", "little")),
        "pooling": Refused((), "it is a setting of the server"),
        "input_type": Refused((), "write what the model expects in front of the text"),
    }

    encoding_format: Annotated[Literal["float", "base64"] | None, Wire(neutral=("float",))] = Field(
        None, description="numbers, or their little-endian float32 bytes in base64; default float"
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="keep the first N numbers, scaled to length 1 again, of a model that is trained for it "
        "(Matryoshka); default: all",
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
