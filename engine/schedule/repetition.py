"""Detects an output that ends in the same n-gram several times in a row."""

from array import array
from collections.abc import Iterator

from engine.request import RepetitionStop


def is_repeating(token_ids: "array[int]", num_output_tokens: int, stop: RepetitionStop) -> bool:
    """Return True if `token_ids` end in the same `stop.ngram` tokens, `stop.times` times in a row.

    With `stop.min_ngram` an n-gram may have from that many to `stop.ngram` tokens. Only the last
    `num_output_tokens` tokens count. A comparison of the newest token nearly always suffices for False.
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
    """Yield the distances of earlier occurrences of the newest token, from `most` tokens to `least`.

    Searches bytes: 2 µs for 256 tokens, instead of 25 µs one token at a time.
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
