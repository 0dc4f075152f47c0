"""Requests to the engine: frozen values that any thread may use."""

import math
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar

from engine.constraint import Constraint
from engine.errors import InvalidRequest
from engine.readouts import MAX_LOGPROBS, Readout

MAX_LOGIT_BIAS = 1024
MAX_REPEATED_TOKENS = 4096
MAX_REPEATED_SIZES = 256  # compared at every token
MAX_SMALL_SET = 4096
# Of sampling parameters, the least and the greatest value. No comparison with NaN is true.
MOST = sys.float_info.max
RANGES = (
    ("max_tokens", 0, 2**63 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("temperature", 0.0, MOST),
    ("top_p", 0.0, 1.0),
    ("top_k", 0, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -MOST, MOST),
    ("frequency_penalty", -MOST, MOST),
    ("repetition_penalty", sys.float_info.min, MOST),
)
# Line breaks with indentation, or spaces: allows pretty-printing, but no endless blanks.
JSON_WHITESPACE = r"(\r?\n[ \t]{0,32}|[ \t]{1,8})"

R = TypeVar("R")
GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A description of the whole output, in one of several languages.

    `source` depends on `kind`: a schema as JSON (json_schema); a JSON list of strings (choice); an expression
    without look-around or back-references that matches the whole output (regex); a grammar in GBNF or Lark
    syntax (ebnf) or in llguidance's own Lark (lark). json_object, any JSON object, needs none. `whitespace`
    is an expression for blanks between the tokens of JSON, empty for none. `around` are rules in llguidance's
    Lark that describe the output in place of this grammar, which is their rule `answer`. With
    `includes_reasoning` the output is described from its first token, else from the end of its reasoning.
    Objects that list properties have no others, unless the schema says so or `closes_objects` is False (None:
    the engine's setting decides). `param` and `label` name the grammar in error messages.
    """

    kind: GrammarKind
    source: str = field(default="", repr=False)
    whitespace: str | None = None
    around: str = field(default="", repr=False)
    includes_reasoning: bool = False
    closes_objects: bool | None = None
    param: str = field(default="grammar", compare=False)
    label: str = field(default="grammar", compare=False)

    @property
    def json_options(self) -> dict[str, Any]:
        """Options of llguidance for blanks in JSON."""
        if self.whitespace == "":
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.whitespace or JSON_WHITESPACE}


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """The markers around reasoning before the answer; `is_open`: the prompt already contains the first one.

    A marker that is a token of SamplingParams.marks is spelled with its mark.
    """

    open: str
    close: str
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class RepetitionStop:
    """Ends an output that ends in the same n-gram `times` times in a row.

    The n-gram has `ngram` tokens, or with `min_ngram` any number from that to `ngram`.
    """

    REASON: ClassVar[str] = "repetition_stop"

    ngram: int
    times: int
    min_ngram: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. All values are final: defaults are already applied.

    Sampling: `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 switch the filter off. Filters
    apply after temperature: top-k, then top-p, then min-p (relative to the most likely token). With `seed`
    None the engine draws one. Presence and frequency penalties count output tokens only; the repetition
    penalty (1 = off) counts prompt and output, as in transformers. `logit_bias` has at most MAX_LOGIT_BIAS
    entries.

    Allowed tokens: only `allowed_token_ids`, if there are any, can be chosen, and only `first_token_ids` as
    the first token. The last token of each of `bad_words_ids` is never chosen after the others;
    Engine.prepare() adds the ids of `bad_words`. With `token_healing` it removes the last token of the
    prompt; the output then begins with the text of these `healed_token_ids`, and does not show it.

    Logprobs: `logprobs` returns the log-probability of each chosen token and of that many most likely ones (0
    to MAX_LOGPROBS).

    Text: `marks` are tokens (id, text) that are shown with a mark (control_tokens.py), which distinguishes
    them from other tokens that spell the text. Inside `reasoning` stop strings have no effect; its tokens are
    counted.

    End: with a `grammar` the output ends when no token is allowed, even before `min_tokens`. A
    `repetition_stop` ends it after `min_tokens` at the earliest, and shows all of it. With `max_tokens` 0
    only the prompt is computed.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] = frozenset()
    first_token_ids: frozenset[int] = frozenset()
    token_healing: bool = False
    healed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    repetition_stop: RepetitionStop | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    marks: tuple[tuple[int, str], ...] = ()
    reasoning: ReasoningSpan | None = None
    grammar: Grammar | None = None

    @property
    def has_penalties(self) -> bool:
        """True if a penalty makes the choice of a token depend on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of beam search: `width` outputs grow side by side.

    The score of an output is its sum of log-probabilities / length ** `length_penalty`; a token that ends it
    counts. `early_stopping` says when `width` complete outputs end the search: True at once; False when no
    growing output has a better score at its present length than the worst of them; "never" when none can
    reach a better score.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Placeholder tokens of a prompt, at positions `start` to `end`, in place of content such as an image.

    `content_hash` identifies the content among all of its `kind`: KV pages are shared only where both are
    equal, so it must be a cryptographic hash of everything that the model reads there.
    """

    start: int
    end: int
    kind: str
    content_hash: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One continuation to compute: token ids in, at most `sampling.max_tokens` tokens out.

    With `use_prefix_cache` KV pages of equal prompt beginnings are reused, and kept for later requests;
    `cache_salt` restricts that to requests of the same salt. A lower `priority` is served earlier. A request
    fails if it has not started after `queue_timeout_seconds` or not ended after `timeout_seconds`. With
    `return_tokens`, and always with log-probabilities, its deltas list their tokens. Engine.prepare() makes
    `constraints` from the sampling parameters. `readouts`, at most one of each class, are computed of the
    prompt and returned by the stream. `spans` of the prompt are in order and do not overlap.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    sampling: SamplingParams
    use_prefix_cache: bool = True
    cache_salt: str | None = None
    priority: int = 0
    queue_timeout_seconds: float | None = None
    timeout_seconds: float | None = None
    return_tokens: bool = False
    constraints: tuple[Constraint, ...] = field(default=(), repr=False)
    readouts: tuple[Readout, ...] = ()
    spans: tuple[PromptSpan, ...] = ()

    def readout(self, kind: type[R]) -> R | None:
        """Return its readout of this class, or None."""
        return next((readout for readout in self.readouts if isinstance(readout, kind)), None)

    def check_heads(self, num_labels: int) -> None:
        """Raise InvalidRequest if it needs a head that the model does not have.

        A model with `num_labels` has a score head, one without has a language model head.
        """
        heads = {readout.head for readout in self.readouts}
        if num_labels and (self.sampling.max_tokens or "language model" in heads):
            raise InvalidRequest(
                "The served model has a score head in place of a language model head: it computes scores, "
                "not text or log-probabilities.",
                "model",
            )
        if not num_labels and "score" in heads:
            raise InvalidRequest("The served model has no score head.", "model")

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest for a value out of range, which would index wrong memory or sample noise."""
        sampling = self.sampling
        for param, low, high in RANGES:
            value, kind = getattr(sampling, param), int if isinstance(low, int) else int | float
            if not (isinstance(value, kind) and low <= value <= high):
                number = "an integer" if kind is int else "a number"
                raise InvalidRequest(
                    f"'{param}' is {value!r:.99}, and must be {number} between {low:g} and {high:g}.", param
                )
        for readout in self.readouts:
            readout.check()
        end = 0
        for span in self.spans:
            if not end <= span.start < span.end <= len(self.prompt_token_ids):
                raise InvalidRequest("The spans of a prompt must lie in it, one after the other.", "prompt")
            end = span.end
        for param, token_ids in (
            ("prompt", self.prompt_token_ids),
            ("stop_token_ids", sampling.stop_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("first_token_ids", sampling.first_token_ids),
            ("bad_words_ids", [token_id for ids in sampling.bad_words_ids for token_id in ids]),
            ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ):
            if not token_ids:
                continue
            if isinstance(token_ids, frozenset) and len(token_ids) > MAX_SMALL_SET:
                least, most = bounds(token_ids)
            else:
                least, most = min(token_ids), max(token_ids)
            if not 0 <= least <= most < vocab_size:
                raise InvalidRequest(
                    f"A token id in '{param}' is out of range: ids go from 0 to {vocab_size - 1}.", param
                )
        stop = sampling.repetition_stop
        if stop is not None and (
            stop.ngram < 1 or stop.times < 2 or stop.ngram * stop.times > MAX_REPEATED_TOKENS
        ):
            raise InvalidRequest(
                "'repetition_stop' must have an 'ngram' of at least 1 and 'times' of at least 2, together "
                f"at most {MAX_REPEATED_TOKENS} tokens.",
                "repetition_stop",
            )
        if stop is not None and stop.min_ngram is not None:
            num_sizes = stop.ngram - stop.min_ngram + 1
            if stop.min_ngram < 1 or not 1 <= num_sizes <= MAX_REPEATED_SIZES:
                raise InvalidRequest(
                    "'repetition_stop' must have a 'min_ngram' of at least 1 and at most 'ngram', with "
                    f"{MAX_REPEATED_SIZES} sizes at most.",
                    "repetition_stop",
                )
        if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"'logit_bias' has more than {MAX_LOGIT_BIAS} entries.", "logit_bias")
        if sampling.logit_bias and not all(math.isfinite(bias) for _, bias in sampling.logit_bias):
            raise InvalidRequest("'logit_bias' must hold finite numbers.", "logit_bias")
        seed, logprobs = sampling.seed, sampling.logprobs
        if seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
            raise InvalidRequest(f"'seed' is {seed!r:.99}, and must be an integer of 64 bits.", "seed")
        if logprobs is not None and not (isinstance(logprobs, int) and 0 <= logprobs <= MAX_LOGPROBS):
            raise InvalidRequest(f"'logprobs' must be an integer between 0 and {MAX_LOGPROBS}.", "logprobs")


@lru_cache(maxsize=4)
def bounds(token_ids: frozenset[int]) -> tuple[int, int]:
    """Return the least and the greatest of a large set of token ids; cached for requests that share the set.

    Scanning 150,000 ids takes 10 ms.
    """
    return min(token_ids), max(token_ids)
