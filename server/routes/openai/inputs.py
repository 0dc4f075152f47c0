"""What endpoints share that compute a readout for each of their inputs."""

from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import StepFailed
from engine.readouts import Readout
from engine.request import Request, SamplingParams
from server.answer import Answer, Delta, collect_all
from server.context import ServerContext
from server.limits import max_answers, room_after
from server.parsing.output import ParsedStream
from server.prompt import encode_each
from server.schema.inputs import InputsRequest

if TYPE_CHECKING:
    from engine import RequestStream


async def compute(
    context: ServerContext, wire: InputsRequest, answer: Answer, readout: Readout, param: str = "input"
) -> list[Delta]:
    """Encode the inputs, submit a request for each, and wait for all of them.

    More than an idle server queues are submitted in several parts, one after the other.
    `param` is the name that the client knows the inputs by.
    Raises InvalidRequest, ContextLengthExceeded, and what submitting and collecting raise.
    """
    limits = context.limits
    prompts = await encode_each(
        wire.input,
        context.engine.tokenizer,
        limits,
        add_special_tokens=wire.add_special_tokens is not False,
        param=param,
    )
    requests: list[Request] = []
    for token_ids in prompts:
        room_after(len(token_ids), limits, param)
        requests.append(
            Request(
                f"{answer.id}-{len(requests)}",
                tuple(token_ids),
                SamplingParams(max_tokens=0),
                use_prefix_cache=wire.cache_prompt is not False,
                cache_salt=wire.cache_salt,
                readouts=(readout,),
            )
        )
    streams: list[RequestStream | ParsedStream] = []
    deltas: list[Delta] = []
    size = max_answers(limits)
    for first in range(0, len(requests), size):
        await answer.submit(context.engine, requests[first : first + size], n=1)
        deltas += await collect_all(answer.streams)
        streams += answer.streams
    answer.requests, answer.streams = requests, streams
    return deltas


def finite_readout(stream: "RequestStream | ParsedStream", kind: type[Readout]) -> np.ndarray:
    """Return the result of a stream's readout. Raises StepFailed if a number in it is not finite."""
    assert not isinstance(stream, ParsedStream), "a readout is no text"
    found: Any = stream.readout(kind)
    if not np.isfinite(found).all():
        raise StepFailed("The model computed no finite numbers for this input.")
    values: np.ndarray = found
    return values
