"""Whether an output goes round in circles."""

from array import array

from engine.request import RepetitionStop


def is_repeating(token_ids: "array[int]", num_output_tokens: int, stop: RepetitionStop) -> bool:
    """Whether the newest tokens are the same `stop.ngram` ones, `stop.times` times in a row.

    Of `token_ids` only the last `num_output_tokens` count. Nearly always two tokens tell.
    """
    ngram, num_tokens = stop.ngram, stop.ngram * stop.times
    if num_output_tokens < num_tokens or token_ids[-1] != token_ids[-1 - ngram]:
        return False
    return token_ids[-num_tokens:-ngram] == token_ids[ngram - num_tokens :]
