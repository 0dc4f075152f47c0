"""Runs the plans of a record again on the same model, and reports the first token that differs."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from engine.config import EngineConfig
from engine.constraint import Constraint
from engine.constraints.grammar import Vocabulary, compile_grammar
from engine.constraints.kinds import constraints_of, is_constrained
from engine.device.runner import ModelRunner
from engine.device.thread import LaunchedStep, Runner
from engine.outputs import StepPlan
from engine.record.reader import Arrived, Completed, Planned, Record, Tokens
from engine.request import SamplingParams
from engine.startup import find, load_tokenizer
from engine.text.token_bytes import TokenPieces
from models.catalog import ModelFiles
from models.fingerprint import fingerprint


@dataclass(frozen=True)
class Difference:
    """A token that differs: output number `token_index` of a request, computed in step `step_id`."""

    step_id: int
    sequence_id: int
    request_id: str
    token_index: int
    recorded: Tokens
    computed: Tokens


@dataclass(frozen=True)
class Replayed:
    """The result of a replay. `ending`: why the record ends, if it was not closed."""

    num_steps: int
    num_tokens: int
    num_sequences: int
    first: Difference | None
    num_different: int
    ending: str | None


def replay(
    path: Path,
    *,
    model: str | None = None,
    device: str | None = None,
    cache_dir: Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Replayed:
    """Load the recorded model, or `model` if its path differs here, and run the plans of a record on it.

    Blocks. Raises ValueError for a file that is no record, or for a record of another model, and ModelError.
    """
    record = Record(path)
    header = record.header
    report = on_progress or (lambda line: None)
    files = find(model or header.model, cache_dir)
    if fingerprint(files) != header.fingerprint:
        raise ValueError(f"{path} was recorded with another model than {files.name}: its weights differ")
    settings = {
        "model": header.model,
        "dtype": header.dtype,
        "quantization": header.quantization or "auto",
        "kv_dtype": header.kv_dtype,
        "device": device or header.device,
        "page_size": header.page_size,
        "kv_tokens": header.num_pages * header.page_size,
        "max_model_len": header.max_model_len,
        "max_num_seqs": header.max_num_seqs,
        "token_budget": header.token_budget,
        "threads": header.threads,
    }
    try:
        config = EngineConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path} has a broken first line: {first['loc'][0]}: {first['msg']}") from None
    record.constrain = _Constrainer(files)
    runner = ModelRunner.load(config, files, header.token_budget)
    report(f"loaded {files.name}; {runner.dtype} on {runner.device}")
    return compare(record, runner)


class _Constrainer:
    """Builds the constraints of recorded requests; loads the tokenizer for the first one that has any."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files

    @cached_property
    def _tokenizer(self) -> tuple[TokenPieces, Vocabulary | None]:
        tokenizer, vocabulary = load_tokenizer(self._files)
        return tokenizer.pieces, vocabulary

    def __call__(self, sampling: SamplingParams) -> tuple[Constraint, ...]:
        if not is_constrained(sampling):
            return ()
        pieces, vocabulary = self._tokenizer
        grammar = sampling.grammar
        compiled = None if grammar is None else compile_grammar(grammar, vocabulary)
        return constraints_of(sampling, pieces, compiled)


def compare(record: Record, runner: Runner) -> Replayed:
    """Run the plans of a record, with its run-ahead, and compare the tokens with the recorded ones."""
    in_flight: deque[tuple[StepPlan, LaunchedStep]] = deque()
    request_ids: dict[int, str] = {}
    num_prompt_tokens: dict[int, int] = {}
    different: set[int] = set()
    first: Difference | None = None
    num_steps = num_tokens = 0
    for event in record.events():
        match event:
            case Arrived(_, sequence_id, request_id, prompt):
                request_ids[sequence_id] = request_id
                num_prompt_tokens[sequence_id] = len(prompt)
            case Planned(_, plan):
                in_flight.append((plan, runner.launch(plan)))
            case Completed(step_id, _, _, tokens):
                # A step that failed when it was recorded has no tokens.
                while in_flight and in_flight[0][0].step_id < step_id:
                    in_flight.popleft()[1].wait()
                plan, launched = in_flight.popleft()
                num_steps += 1
                computed = launched.wait().tokens
                num_tokens += sum(map(len, tokens))
                for index, (theirs, ours) in enumerate(zip(tokens, computed, strict=True)):
                    if theirs != ours:
                        sequence_id = plan.sequence_ids[index]
                        different.add(sequence_id)
                        if first is None:
                            first = Difference(
                                step_id,
                                sequence_id,
                                request_ids[sequence_id],
                                end_of(plan, index) - num_prompt_tokens[sequence_id],
                                theirs,
                                ours,
                            )
    return Replayed(num_steps, num_tokens, len(request_ids), first, len(different), record.ending)


def end_of(plan: StepPlan, index: int) -> int:
    """Return the number of tokens of a sequence up to and including those that row `index` computes."""
    return plan.starts[index] + plan.query_lens[index]
