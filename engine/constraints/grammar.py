"""Compiles grammars in threads and matches outputs against them, through llguidance.

llguidance bounds the cost of compiling and of every token, and releases the GIL for both.
"""

import asyncio
import json
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from secrets import token_hex
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from engine.constraint import WORD_BITS, MatchState, num_mask_words, pack_mask
from engine.constraints.grammar_source import translate
from engine.errors import Draining, InvalidRequest, QueueFull
from engine.request import Grammar

logger = logging.getLogger("monoloop.engine")

MAX_KEPT_GRAMMARS = 64
NUM_THREADS = 2
MAX_JOBS = 64
COMPILE_SECONDS = 5.0
END = "<|end of output|>"
# llguidance lists all special tokens it knows after an unknown one; that list is ours, not the client's.
TOKEN_NAMES = re.compile(r"; following special tokens are available:.*")
PLACE_IN_RULES = re.compile(r"^at \d+\(\d+\): |\n +\d+ \| .*", re.DOTALL)
# Limits of one mask computation: each alternative or optional property that is open at once counts.
LIMITS = LLParserLimits(
    max_items_in_row=50_000, step_max_items=50_000, max_lexer_states=50_000, verbose_errors=False
)


class Vocabulary:
    """The bytes of every token of a `tokenizers.Tokenizer`, as llguidance needs them.

    For a model without eos, a token added to a copy of the tokenizer represents the end; no mask allows it.
    Building takes half a second with the GIL held, so it happens before serving begins. Raises ValueError for
    a tokenizer that llguidance cannot read, or whose decoder does more than join bytes.
    """

    def __init__(self, backend: Any, eos_token_ids: Sequence[int]) -> None:
        # An id of the model's vocabulary may have a logit and no token.
        eos = [token_id for token_id in eos_token_ids if backend.id_to_token(token_id) is not None]
        end: list[int] = []
        if not eos:
            backend = type(backend).from_str(backend.to_str())
            backend.add_special_tokens([END])
            end = [backend.token_to_id(END)]
        self.tokenizer = LLTokenizer(_without_control_texts(backend), eos_token=eos or end)
        self.control_tokens = {
            token.content: token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.executor = LLExecutor()
        bits = np.ones(num_mask_words(self.tokenizer.vocab_size) * WORD_BITS, np.uint8)
        bits[end] = 0
        self._all_tokens = pack_mask(bits)
        self._check_exact(backend)

    def _check_exact(self, backend: Any) -> None:
        """Check on a sample of tokens, each followed by itself, that their text is their bytes."""
        ids = range(0, backend.get_vocab_size(with_added_tokens=False), 97)
        for token_id, text in zip(
            ids, backend.decode_batch([[token_id] * 2 for token_id in ids]), strict=True
        ):
            data = self.tokenizer.decode_bytes([token_id, token_id])
            if text and text.lstrip() != data.decode(errors="replace").lstrip():
                raise ValueError(f"token {token_id} twice decodes to {text!r}, not to {data!r}")

    def masks(self, matchers: Sequence[LLMatcher]) -> np.ndarray:
        """Return mask rows int32 [len(matchers), num_words]; all zero where a matcher has stopped."""
        words = np.zeros((len(matchers), len(self._all_tokens)), np.int32)
        going = [(matcher, row) for row, matcher in enumerate(matchers) if not matcher.is_stopped()]
        if going:
            self.executor.unsafe_compute_mask_ptr(going, words.ctypes.data, words.shape[1] * 4, len(words))
        for matcher, row in going:
            if matcher.is_error():
                words[row] = 0
        words &= self._all_tokens
        return words


def _without_control_texts(backend: Any) -> str:
    """Return the tokenizer as JSON, with its control tokens renamed so that no text spells one.

    Where a grammar allows a single text, llguidance tokenizes it itself, and would find control tokens in it.
    """
    definition, salt = backend.to_str(), token_hex(16)
    for token_id, token in backend.get_added_tokens_decoder().items():
        if token.special:  # wherever it is named: to parse the JSON takes seconds
            name = json.dumps(token.content, ensure_ascii=False)
            definition = definition.replace(name, f'"<|{salt} {token_id}|>"')
    return str(definition)


class CompiledGrammar:
    """A grammar as a constraint: followers start from copies of its matcher."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self.vocabulary = vocabulary
        self._matcher = matcher

    def new_matcher(self) -> LLMatcher:
        """Return a matcher of llguidance at the beginning."""
        return self._matcher.deep_copy()

    def start(self) -> "GrammarMatcher":
        """Return a matcher for a new sequence."""
        return GrammarMatcher(self)


class GrammarMatcher:
    """The state of one sequence in its grammar."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.vocabulary = grammar.vocabulary
        self._grammar = grammar

    @cached_property
    def matcher(self) -> LLMatcher:
        """The matcher of llguidance, made at first use, on the thread that computes masks."""
        return self._grammar.new_matcher()

    @classmethod
    def fill_masks(
        cls,
        matchers: Sequence["GrammarMatcher"],
        new_token_ids: Sequence[Sequence[int]],
        masks: np.ndarray,
    ) -> list[MatchState]:
        """Compute the masks of all rows in parallel; see Matcher."""
        inner = [matcher.matcher for matcher in matchers]
        for matcher, token_ids in zip(inner, new_token_ids, strict=True):
            matcher.consume_tokens(list(token_ids))
        words = matchers[0].vocabulary.masks(inner)
        # The logits may be wider than the tokenizer's vocabulary, or narrower.
        width = min(words.shape[1], masks.shape[1])
        masks[:, :width] &= words[:, :width]
        masks[:, width:] = 0
        return [MatchState.MAY_STOP if _may_end(matcher) else MatchState.MUST_CONTINUE for matcher in inner]

    @property
    def problem(self) -> str:
        """The limit of llguidance that was exceeded, or its other error; see Matcher."""
        return _error_of(self.matcher)


def _may_end(matcher: LLMatcher) -> bool:
    return not matcher.is_error() and (matcher.is_stopped() or matcher.is_accepting())


@dataclass(slots=True)
class _Job:
    """A grammar being compiled in a thread; the result is the grammar, or a message that says why not."""

    future: Future[CompiledGrammar | str]
    ready: asyncio.Future[CompiledGrammar | str]
    num_waiting: int = 0


class GrammarCompiler:
    """Compiles grammars in a few threads and caches the most recent ones. Call its methods on the loop.

    Without a vocabulary (the tokenizer does not allow grammars) every grammar is refused. With `open_objects`
    the objects of schemas stay open where the grammar does not say.
    """

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        compile_seconds: float = COMPILE_SECONDS,
        *,
        open_objects: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._open_objects = open_objects
        self._compile_seconds = compile_seconds
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._jobs: dict[Grammar, _Job] = {}
        self._is_closed = False

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return a grammar compiled. Raises InvalidRequest if it is wrong, too large or too slow.

        Raises QueueFull if other grammars keep all threads busy, and Draining after close().
        """
        if self._open_objects and grammar.closes_objects is None:
            grammar = replace(grammar, closes_objects=False)
        kept = self._kept.get(grammar)
        if kept is not None:
            self._kept.move_to_end(grammar)
            return kept
        job = self._jobs.get(grammar) or self._begin(grammar)
        job.num_waiting += 1
        try:
            await asyncio.wait([job.ready], timeout=self._compile_seconds)
            if not job.ready.done():
                if not job.future.running():  # other grammars took the time, not this one
                    raise self._busy()
                problem = f"it was not ready to use after {self._compile_seconds:g} seconds"
                raise InvalidRequest(f"Invalid {grammar.label}: {problem}", grammar.param)
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and job.future.cancel():  # it has not begun, and no request waits for it
                self._jobs.pop(grammar, None)
        if job.ready.cancelled():
            raise Draining("The server is shutting down.")
        outcome = job.ready.result()
        if isinstance(outcome, str):
            raise InvalidRequest(f"Invalid {grammar.label}: {outcome}", grammar.param)
        return outcome

    def _begin(self, grammar: Grammar) -> _Job:
        if self._is_closed:
            raise Draining("The server is shutting down.")
        if len(self._jobs) >= MAX_JOBS:
            raise self._busy()
        future = self._threads.submit(_outcome, grammar, self._vocabulary)
        job = self._jobs[grammar] = _Job(future, asyncio.wrap_future(future))
        job.ready.add_done_callback(lambda ready: self._take(grammar, job))
        return job

    def _take(self, grammar: Grammar, job: _Job) -> None:
        """Forget a job that has ended, and cache its grammar."""
        if self._jobs.get(grammar) is job:
            del self._jobs[grammar]
        outcome = None if job.ready.cancelled() else job.ready.result()
        if isinstance(outcome, CompiledGrammar):
            self._kept[grammar] = outcome
            if len(self._kept) > MAX_KEPT_GRAMMARS:
                self._kept.popitem(last=False)

    def _busy(self) -> QueueFull:
        return QueueFull("Other grammars are being compiled already.", math.ceil(self._compile_seconds))

    def close(self) -> None:
        """Stop the threads; work that has begun is finished."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


def _outcome(grammar: Grammar, vocabulary: Vocabulary | None) -> CompiledGrammar | str:
    """Return the grammar compiled, or the message for the client.

    Not an exception: raised by several requests, it would keep the frames of all of them alive.
    """
    try:
        return compile_grammar(grammar, vocabulary)
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return str(error)
    except BaseException:  # a panic in Rust is not an Exception
        logger.exception("a grammar of kind %s could not be compiled", grammar.kind)
        return "the compiler failed on it"


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary | None) -> CompiledGrammar:
    """Compile on the calling thread. Raises ValueError or RecursionError for an invalid grammar."""
    if vocabulary is None:
        raise ValueError("this model's tokenizer allows no grammars")
    matcher = LLMatcher(
        vocabulary.tokenizer, translate(grammar, vocabulary.control_tokens), log_level=0, limits=LIMITS
    )
    if (problem := _error_of(matcher)) and (grammar.kind == "lark" or grammar.around):
        raise ValueError(PLACE_IN_RULES.sub("", problem))  # the client did not write these rules
    _raise_error(matcher)
    compiled = CompiledGrammar(vocabulary, matcher)
    # Some errors are found only by the lexer, when it computes the first mask.
    first = compiled.new_matcher()
    mask = vocabulary.masks([first])
    _raise_error(first)
    if not mask.any() and not _may_end(first):
        raise ValueError("no text matches it")
    return compiled


def _raise_error(matcher: LLMatcher) -> None:
    if problem := _error_of(matcher):
        raise ValueError(problem)


def _error_of(matcher: LLMatcher) -> str:
    """Return the error of a matcher, empty if it has none."""
    if not matcher.is_error():
        return ""
    lines = [line for line in matcher.get_error().splitlines() if line != "<non-verbose/>"]
    problem = TOKEN_NAMES.sub("", "\n".join(lines))[:1000]
    if problem.startswith("oneOf constraints are not supported"):  # it names an option that no request has
        return "oneOf is not supported where a value may match two of its schemas; use anyOf"
    return "no text matches it" if problem.startswith("NoExtension") else problem
