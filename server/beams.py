"""An answer that is searched for, not drawn."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine import search_beams
from engine.request import BeamParams, Request
from server.answer import Answer, abort_all
from server.convert import Limits, check_num_answers
from server.errors import UnsupportedField

if TYPE_CHECKING:
    from engine import Engine, RequestStream


def submit_beams(
    answer: Answer, engine: "Engine", requests: Sequence[Request], n: int, beams: BeamParams, limits: Limits
) -> None:
    """Begin a search for the best `n` answers to each prompt; every `n` of the requests share one.

    Raises InvalidRequest, UnsupportedField.
    """
    sampling = requests[0].sampling
    if sampling.grammar is not None:
        param = sampling.grammar.param
        raise UnsupportedField(f"{param} cannot be used together with use_beam_search.", param)
    if sampling.prompt_logprobs is not None:
        raise UnsupportedField("Beam search tells no log-probabilities of the prompt.", "use_beam_search")
    check_num_answers(beams.width * len(requests) // n, limits, "use_beam_search")
    streams: list[RequestStream] = []
    try:
        for first in range(0, len(requests), n):
            streams += search_beams(engine, requests[first], beams, n)
    except BaseException:
        abort_all(streams)
        raise
    answer.requests, answer.n, answer.streams = requests, n, streams
