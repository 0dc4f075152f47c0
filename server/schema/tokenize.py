"""POST /tokenize and /detokenize, GET /tokenizer_info (shapes of vLLM), POST /tokens (shape of LightLLM)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from server.schema.chat import (
    MAX_MESSAGES,
    ChatMessage,
    ChatRequest,
    ReasoningEffort,
    ReasoningOptions,
    check_continuation,
)
from server.schema.foreign import prompt_field
from server.schema.refused_fields import Refused
from server.schema.tools import MAX_TOOLS, Choice, Tool
from server.schema.wire import ModelRequest, Wire, WireResponse

TEXT_ONLY = "the model reads text only"
MULTIMODAL = prompt_field(({}, {"images": []}), TEXT_ONLY)


class TokenizeRequest(ModelRequest):
    """Body of POST /tokenize: a prompt, or the messages of a chat."""

    DIALECT = "/tokenize"
    REFUSES = "prompt"
    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "mm_processor_kwargs": prompt_field(({},), TEXT_ONLY),
        "truncate_prompt_tokens": Refused((), "all tokens are counted"),
    }

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    prompt: str | None = Field(None, description="text to tokenize; this or messages")
    messages: list[ChatMessage] | None = Field(
        None,
        min_length=1,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description="a conversation to render and tokenize",
        validate_default=True,
    )
    add_special_tokens: bool | None = Field(
        None, description="let the tokenizer add its special tokens (such as BOS) to a prompt; default true"
    )
    return_token_strs: Annotated[bool | None, Wire(neutral=(False,))] = Field(
        None, description="name the tokens, too; default false"
    )
    add_generation_prompt: bool | None = Field(
        None, description="let the template open the assistant's turn; default true"
    )
    continue_final_message: bool | None = Field(
        None, description="leave the last message open instead of opening a turn; default false"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=64, description="further variables for the chat template"
    )
    documents: list[dict[str, Any]] | None = Field(
        None, fail_fast=True, description="documents for the chat template"
    )
    reasoning_effort: ReasoningEffort | None = Field(None, description="given to the chat template")
    reasoning: ReasoningOptions | None = None
    tools: list[Tool] | None = Field(
        None, max_length=MAX_TOOLS, description="given to the chat template, as in chat"
    )
    tool_choice: Choice | None = Field(None, description="none: the template is given no tools; default auto")

    @field_validator("messages")
    @classmethod
    def check_form(cls, value: list[ChatMessage] | None, info: ValidationInfo) -> list[ChatMessage] | None:
        """Check that there is a prompt or messages, not both."""
        if "prompt" in info.data and (info.data["prompt"] is None) == (value is None):
            raise ValueError("send either prompt or messages")
        return value

    @field_validator("add_special_tokens")
    @classmethod
    def check_special_tokens(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        """Refuse it for messages."""
        if value and info.data.get("messages"):
            raise ValueError("it is for a prompt; a chat template writes its own")
        return value

    _check_continuation = field_validator("continue_final_message")(check_continuation)

    @property
    def chat(self) -> ChatRequest:
        """The chat request whose prompt is asked about. Its fields have been checked here."""
        return ChatRequest.model_construct(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            documents=self.documents,
            reasoning_effort=self.reasoning_effort,
            reasoning=self.reasoning,
            tools=self.tools,
            tool_choice=self.tool_choice,
        )


class TokenizeResponse(WireResponse):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int = Field(description="longest prompt plus output, in tokens")
    tokens: list[int]
    token_strs: list[str] | None = Field(
        None, description="the tokens as the vocabulary spells them; only with return_token_strs"
    )


class DetokenizeRequest(ModelRequest):
    """Body of POST /detokenize."""

    DIALECT = "/detokenize"
    REFUSES = "own"

    tokens: list[int] = Field(fail_fast=True, description="token ids, no more than the context holds")


class DetokenizeResponse(WireResponse):
    """Answer of POST /detokenize."""

    prompt: str = Field(description="the text, with special tokens")


class TokenizerInfo(WireResponse):
    """Special tokens and chat template, for clients that tokenize or render by themselves."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    vocab_size: int = Field(description="token ids lie below it")
    model_max_length: int = Field(description="longest prompt plus output, in tokens")


class TokensRequest(ModelRequest):
    """Body of POST /tokens, LightLLM's count of tokens."""

    DIALECT = "/tokens"
    REFUSES = "own"
    REFUSED: ClassVar[Mapping[str, Refused]] = {"multimodal_params": MULTIMODAL}

    text: str
    parameters: dict[str, Any] | None = Field(
        None, description="those of /generate; add_special_tokens alone changes the count"
    )


class TokensResponse(WireResponse):
    """Answer of POST /tokens."""

    ntokens: int
