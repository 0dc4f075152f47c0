"""`echo` of completions: prompts in front of their continuations."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine import TokenizerPool
from server.schema.completions import CompletionRequest


@dataclass(frozen=True, slots=True)
class Echo:
    """The texts of the prompts, none if they are not echoed; each has `num_samples` answers."""

    texts: Sequence[str] = ()
    num_samples: int = 1

    @classmethod
    async def of(
        cls, wire: CompletionRequest, prompts: Sequence[list[int]], tokenizer: TokenizerPool
    ) -> "Echo":
        """Return what a request wants echoed: a text as it was sent, token ids and cut prompts decoded.

        A text whose token offsets are returned is decoded, too, so that control tokens have no characters, or
        all of them, in both.
        """
        if not wire.echo:
            return NO_ECHO
        skip = wire.skip_special_tokens is not False
        texts = [
            prompt
            if isinstance(prompt, str) and wire.truncate_prompt_tokens is None and wire.logprobs is None
            else await tokenizer.decode_prompt(token_ids, skip_special_tokens=skip)
            for prompt, token_ids in zip(wire.prompt, prompts, strict=True)
        ]
        return cls(texts, wire.num_samples)

    def __bool__(self) -> bool:
        return bool(self.texts)

    def text(self, index: int) -> str:
        """Return the text in front of answer `index`."""
        return self.texts[index // self.num_samples] if self.texts else ""


NO_ECHO = Echo()
