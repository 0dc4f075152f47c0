"""Root of requests that compute a result for each of their inputs and generate nothing."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema
from pydantic.functional_validators import PlainValidator

from server.schema.completions import Prompt, check_prompts, prompt_schema
from server.schema.foreign import ONE
from server.schema.refused_fields import Refused
from server.schema.wire import ModelRequest

MAX_INPUTS = 2048  # as in OpenAI's API
INPUT_ONLY = Refused((), "send input")
SHORTEN = Refused((), "shorten the input before sending it")


def check_inputs(value: Any) -> tuple[Prompt, ...]:
    """Return the inputs, in any spelling that check_prompts() takes."""
    return check_prompts(value, MAX_INPUTS, "inputs")


class InputsRequest(ModelRequest):
    """The inputs, and how their tokens are computed."""

    HINT = "nothing is generated here"
    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "messages": INPUT_ONLY,
        "prompt": INPUT_ONLY,
        "inputs": INPUT_ONLY,
        "instructions": Refused(("",), "write them in front of the input"),
        "system": Refused(("",), "write it in front of the input"),
        "n": ONE,
        "priority": Refused((0,), "inputs are served in the order they come"),
        "truncate": SHORTEN,
        "truncate_prompt_tokens": SHORTEN,
    }

    input: Annotated[
        tuple[Prompt, ...], PlainValidator(check_inputs), WithJsonSchema(prompt_schema(MAX_INPUTS))
    ]
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
