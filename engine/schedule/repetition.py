"""Whether an output goes round in circles."""

from array import array
from collections.abc import Iterator

from engine.request import RepetitionStop


def is_repeating(token_ids: "array[int]", num_output_tokens: int, stop: RepetitionStop) -> bool:
    """Whether the newest tokens are the same `stop.ngram` ones, `stop.times` times in a row.

    With `stop.min_ngram` any number from that to `stop.ngram`. Of `token_ids` only the last
    `num_output_tokens` count. Nearly always the newest token tells that they are not.
    """
    most = min(stop.ngram, num_output_tokens // stop.times)
    if stop.min_ngram is not None:
        sizes = _distances(token_ids, stop.min_ngram, most)
        return any(_is_repeated(token_ids, ngram, stop.times) for ngram in sizes)
    if most < stop.ngram or token_ids[-1] != token_ids[-1 - most]:
        return False
    return _is_repeated(token_ids, most, stop.times)


def _is_repeated(token_ids: "array[int]", ngram: int, times: int) -> bool:
    num_tokens = ngram * times
    return token_ids[-num_tokens:-ngram] == token_ids[ngram - num_tokens :]


def _distances(token_ids: "array[int]", least: int, most: int) -> Iterator[int]:
    """How far back the newest token stood before, from `most` tokens to `least`.

    Looked for in bytes: 2 µs for 256 tokens instead of 25 one by one.
    """
    if most < least:
        return
    size = token_ids.itemsize
    newest, before = token_ids[-1:].tobytes(), token_ids[-1 - most : len(token_ids) - least].tobytes()
    place = before.find(newest)
    while place >= 0:
        if place % size == 0:
            yield most - place // size
        place = before.find(newest, place + 1)
