"""May this request start? First come, first served, when its tokens fit beside the growth of the running."""

from engine.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from engine.request import Request
from engine.schedule.pages import PagePool
from engine.schedule.sequence import Sequence


class Admission:
    """Refuses what can never run or has no place in the queue, and says when the queue's head may start."""

    def __init__(self, pool: PagePool, *, max_running: int, max_waiting: int, max_model_len: int) -> None:
        self._pool = pool
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_model_len = max_model_len

    def check(self, request: Request, *, num_waiting: int, num_running: int) -> None:
        """Raise if the request can never run, or may not even wait.

        What waits only for the next step does not count against the bound. Raises InvalidRequest (empty
        prompt), ContextLengthExceeded, QueueFull.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise InvalidRequest("The prompt is empty: at least one token is needed.", "prompt")
        if request.sampling.max_tokens < 1:
            raise InvalidRequest("At least one output token must be asked for.", "max_tokens")
        if num_prompt_tokens + request.sampling.max_tokens > self._max_model_len:
            total = num_prompt_tokens + request.sampling.max_tokens
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self._max_model_len} tokens. However, you "
                f"requested {total} tokens ({num_prompt_tokens} in the prompt, "
                f"{request.sampling.max_tokens} in the completion)."
            )
        if num_waiting >= self._max_waiting + max(0, self._max_running - num_running):
            raise QueueFull(f"{num_waiting} requests are waiting already, which is the limit.")

    def may_start(self, sequence: Sequence, num_running: int) -> bool:
        """Whether all of the sequence's known tokens fit, with one page of growth left for every running one.

        The spare page keeps a newcomer from starting only to push somebody out at the next page border.
        """
        if num_running >= self._max_running:
            return False
        needed = self._pool.pages_for(sequence.num_tokens + 1)
        return needed + num_running <= self._pool.num_free or num_running == 0
