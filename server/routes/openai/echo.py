"""Prompts in front of their continuations, as completions with `echo` have them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from server.schema.completions import CompletionRequest


class Decoder(Protocol):
    """What is used of the engine's TokenizerPool."""

    async def decode_prompt(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Echo:
    """The texts of the prompts, none if they are not echoed; each has `num_samples` answers."""

    texts: Sequence[str] = ()
    num_samples: int = 1

    @classmethod
    async def of(cls, wire: CompletionRequest, prompts: Sequence[list[int]], decoder: Decoder) -> "Echo":
        """What a request wants echoed: a text as it was sent; token ids, or what is left, as their text.

        So is a text whose tokens' offsets are told: control tokens have no characters there, or all of them.
        """
        if not wire.echo:
            return NO_ECHO
        skip = wire.skip_special_tokens is not False
        texts = [
            prompt
            if isinstance(prompt, str) and wire.truncate_prompt_tokens is None and wire.logprobs is None
            else await decoder.decode_prompt(token_ids, skip_special_tokens=skip)
            for prompt, token_ids in zip(wire.prompt, prompts, strict=True)
        ]
        return cls(texts, wire.num_samples)

    def __bool__(self) -> bool:
        return bool(self.texts)

    def text(self, index: int) -> str:
        """What stands in front of answer `index`."""
        return self.texts[index // self.num_samples] if self.texts else ""


NO_ECHO = Echo()
