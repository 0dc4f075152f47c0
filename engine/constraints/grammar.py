"""Grammars that an output must follow: compiled in threads, matched token by token, through llguidance.

llguidance bounds what a grammar may cost, in the making and at every token, and lets the GIL go for both.
"""

import asyncio
import json
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from secrets import token_hex
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from engine.constraint import WORD_BITS, Standing, num_mask_words, pack_mask
from engine.constraints.grammar_source import translate
from engine.errors import Draining, InvalidRequest, QueueFull
from engine.request import Grammar

logger = logging.getLogger("monoloop.engine")

MAX_KEPT_GRAMMARS = 64
NUM_THREADS = 2
MAX_JOBS = 64
COMPILE_SECONDS = 5.0
END = "<|end of output|>"
# What llguidance says behind an unknown token are all names that it knows, and those are ours.
TOKEN_NAMES = re.compile(r"; following special tokens are available:.*")
PLACE_IN_RULES = re.compile(r"^at \d+\(\d+\): |\n +\d+ \| .*", re.DOTALL)
# As much may be open at once as a step may look at: an alternative, an optional property.
LIMITS = LLParserLimits(
    max_items_in_row=50_000, step_max_items=50_000, max_lexer_states=50_000, verbose_errors=False
)


class Vocabulary:
    """The bytes of every token of a `tokenizers.Tokenizer`, as llguidance reads them off.

    A token added to a copy stands for the end of a model that has no eos; it is in no mask. Building it takes
    half a second with the GIL held, so it is not done while something is being served. Raises ValueError for
    a tokenizer that llguidance cannot read, or whose decoder does more than join bytes.
    """

    def __init__(self, backend: Any, eos_token_ids: Sequence[int]) -> None:
        eos, end = list(eos_token_ids), []
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
        """See on some tokens, each followed by itself, that the text is their bytes."""
        ids = range(0, backend.get_vocab_size(with_added_tokens=False), 97)
        for token_id, text in zip(
            ids, backend.decode_batch([[token_id] * 2 for token_id in ids]), strict=True
        ):
            data = self.tokenizer.decode_bytes([token_id, token_id])
            if text and text.lstrip() != data.decode(errors="replace").lstrip():
                raise ValueError(f"token {token_id} twice decodes to {text!r}, not to {data!r}")

    def masks(self, matchers: Sequence[LLMatcher]) -> np.ndarray:
        """Which tokens may come next: int32 [len(matchers), num_words]; none where a matcher has stopped."""
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
    """The tokenizer as JSON, where no text that anybody knows spells a control token.

    Where a grammar leaves one way to go on, llguidance spells that as tokens, control tokens included.
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
        """A matcher at the beginning."""
        return self._matcher.deep_copy()

    def follow(self) -> "GrammarFollower":
        """Begin a continuation."""
        return GrammarFollower(self)


class GrammarFollower:
    """Where one continuation stands in its grammar."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.vocabulary = grammar.vocabulary
        self._grammar = grammar

    @cached_property
    def matcher(self) -> LLMatcher:
        """Made at first use, which is on the thread that computes masks."""
        return self._grammar.new_matcher()

    @classmethod
    def restrict(
        cls,
        followers: Sequence["GrammarFollower"],
        new_token_ids: Sequence[Sequence[int]],
        masks: np.ndarray,
    ) -> list[Standing]:
        """As Follower says; the masks of all rows are computed in parallel."""
        matchers = [follower.matcher for follower in followers]
        for matcher, token_ids in zip(matchers, new_token_ids, strict=True):
            matcher.consume_tokens(list(token_ids))
        words = followers[0].vocabulary.masks(matchers)
        # The logits may be wider than the tokenizer's vocabulary, or narrower.
        width = min(words.shape[1], masks.shape[1])
        masks[:, :width] &= words[:, :width]
        masks[:, width:] = 0
        return [Standing.MAY_END if _may_end(matcher) else Standing.GOES_ON for matcher in matchers]

    @property
    def problem(self) -> str:
        """A limit of the library that the grammar has run into."""
        return _error_of(self.matcher)


def _may_end(matcher: LLMatcher) -> bool:
    return not matcher.is_error() and (matcher.is_stopped() or matcher.is_accepting())


@dataclass(slots=True)
class _Job:
    """A grammar on its way through a thread: compiled, or why it cannot be."""

    future: Future[CompiledGrammar | str]
    ready: asyncio.Future[CompiledGrammar | str]
    num_waiting: int = 0


class GrammarCompiler:
    """Compiles grammars in a few threads, and keeps those used last. Its methods are called on the loop.

    Without a vocabulary (the tokenizer allows none) every grammar is refused.
    """

    def __init__(self, vocabulary: Vocabulary | None, compile_seconds: float = COMPILE_SECONDS) -> None:
        self._vocabulary = vocabulary
        self._compile_seconds = compile_seconds
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._jobs: dict[Grammar, _Job] = {}
        self._is_closed = False

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises InvalidRequest, naming the `param`, for a grammar that is wrong, too large or too slow.

        Raises QueueFull where others' grammars keep all threads busy, Draining where close() was first.
        """
        kept = self._kept.get(grammar)
        if kept is not None:
            self._kept.move_to_end(grammar)
            return kept
        job = self._jobs.get(grammar) or self._begin(grammar)
        job.num_waiting += 1
        try:
            await asyncio.wait([job.ready], timeout=self._compile_seconds)
            if not job.ready.done():
                if not job.future.running():  # others' grammars took the time, not this one
                    raise self._is_busy()
                problem = f"it was not ready to use after {self._compile_seconds:g} seconds"
                raise InvalidRequest(f"Invalid {grammar.label}: {problem}", grammar.param)
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and job.future.cancel():  # it has not begun, and nobody is left to ask
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
            raise self._is_busy()
        future = self._threads.submit(_outcome, grammar, self._vocabulary)
        job = self._jobs[grammar] = _Job(future, asyncio.wrap_future(future))
        job.ready.add_done_callback(lambda ready: self._take(grammar, job))
        return job

    def _take(self, grammar: Grammar, job: _Job) -> None:
        """A job has ended; only what came of it is kept."""
        if self._jobs.get(grammar) is job:
            del self._jobs[grammar]
        outcome = None if job.ready.cancelled() else job.ready.result()
        if isinstance(outcome, CompiledGrammar):
            self._kept[grammar] = outcome
            if len(self._kept) > MAX_KEPT_GRAMMARS:
                self._kept.popitem(last=False)

    def _is_busy(self) -> QueueFull:
        return QueueFull("Other grammars are being compiled already.", math.ceil(self._compile_seconds))

    def close(self) -> None:
        """Stop the threads; work that has begun is finished."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


def _outcome(grammar: Grammar, vocabulary: Vocabulary | None) -> CompiledGrammar | str:
    """The grammar compiled, or what its message says.

    A value: an exception that several requests raise would hold the frames of all.
    """
    try:
        return compile_grammar(grammar, vocabulary)
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return str(error)
    except BaseException:  # what a fault in Rust raises is no Exception
        logger.exception("a grammar of kind %s could not be compiled", grammar.kind)
        return "the compiler failed on it"


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary | None) -> CompiledGrammar:
    """Compile, on this thread. Raises ValueError or RecursionError for what cannot be."""
    if vocabulary is None:
        raise ValueError("this model's tokenizer allows no grammars")
    matcher = LLMatcher(
        vocabulary.tokenizer, translate(grammar, vocabulary.control_tokens), log_level=0, limits=LIMITS
    )
    if (problem := _error_of(matcher)) and (grammar.kind == "lark" or grammar.or_calls):
        raise ValueError(PLACE_IN_RULES.sub("", problem))  # nobody has written these rules
    _raise_error(matcher)
    compiled = CompiledGrammar(vocabulary, matcher)
    # The first mask shows what only the lexer finds out.
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
    """What a matcher complains of; empty for nothing."""
    if not matcher.is_error():
        return ""
    lines = [line for line in matcher.get_error().splitlines() if line != "<non-verbose/>"]
    problem = TOKEN_NAMES.sub("", "\n".join(lines))[:1000]
    return "no text matches it" if problem.startswith("NoExtension") else problem
