from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from engine.outputs import FinishReason
from engine.pacer import COLLECTED_INTERVAL_SECONDS, Pacer


def add(pacer: Pacer, stream_id: int, token_ids: tuple[int, ...], now: float, *, is_last: bool = False):
    """Add tokens of one stream; return those that leave now."""
    finish_reason = FinishReason.LENGTH if is_last else None
    sequence = SimpleNamespace(id=stream_id, finish_reason=finish_reason)
    return tuple(token for _, tokens in pacer.add([(sequence, token_ids)], now) for token in tokens)


class PromptPacer(Pacer):
    """Whatever is released is delivered at once."""

    def _release(self, stream_id, stream, now):
        super()._release(stream_id, stream, now)
        self.delivered(stream_id)


def make_pacer(num_streams: int, max_per_second: int = 1000) -> Pacer:
    pacer = PromptPacer(max_per_second)
    for stream_id in range(num_streams):
        pacer.open(stream_id)
    return pacer


def test_a_lone_stream_never_waits():
    pacer = make_pacer(1)
    for token, now in enumerate((5.0, 5.002, 5.004)):
        assert add(pacer, 0, (token,), now) == (token,)
    assert not pacer.is_holding


def test_tokens_of_many_streams_merge_but_neither_the_first_nor_the_last_wait():
    pacer = make_pacer(100)  # 100 ms between two deliveries of one stream
    sent = {stream_id: [] for stream_id in range(100)}
    for step in range(51):
        now = 7.0 + step * 0.010
        for stream_id in range(100):
            tokens = add(pacer, stream_id, (step,), now, is_last=step == 50)
            if tokens:
                sent[stream_id].append((now, tokens))
    for deliveries in sent.values():
        assert deliveries[0] == (7.0, (0,))
        assert deliveries[-1][0] == 7.5
        assert [token for _, tokens in deliveries for token in tokens] == list(range(51))
        assert 5 <= len(deliveries) <= 8, f"about one delivery in ten steps: {deliveries}"
    per_step = [
        sum(now == 7.0 + step * 0.010 for d in sent.values() for now, _ in d) for step in range(10, 50)
    ]
    assert max(per_step) <= 30, f"deliveries spread over the steps: {per_step}"


def test_tokens_that_no_step_sends_are_due_after_the_interval():
    pacer = make_pacer(10)  # 10 ms
    add(pacer, 3, (1,), 1.0)
    assert add(pacer, 3, (2,), 1.0) == ()
    assert pacer.is_holding
    assert pacer.due(1.0) == []
    assert pacer.due(1.011) == [(3, (2,))]
    assert not pacer.is_holding


def test_a_collected_stream_is_decoded_now_and_then():
    pacer = make_pacer(1)
    pacer.collect(0)
    times = [2.0 + step * 0.01 for step in range(100)]
    sent = [now for step, now in enumerate(times) if add(pacer, 0, (step,), now)]
    assert 3 <= len(sent) <= 1 / COLLECTED_INTERVAL_SECONDS + 1


def test_a_closed_stream_holds_nothing():
    pacer = make_pacer(100)
    add(pacer, 0, (1,), 1.0)
    add(pacer, 0, (2,), 1.0)
    pacer.close(0)
    assert not pacer.is_holding
    assert pacer.num_streams == 99
    assert add(pacer, 0, (3,), 9.0, is_last=True) == ()


def test_tokens_wait_while_those_before_them_are_under_way():
    pacer = Pacer(1000)
    pacer.open(0)
    assert add(pacer, 0, (1,), 1.0) == (1,)
    assert add(pacer, 0, (2,), 2.0) == ()
    assert pacer.due(3.0) == []
    pacer.delivered(0)
    assert add(pacer, 0, (3,), 4.0) == (2, 3)
    assert add(pacer, 0, (4,), 5.0) == ()
    assert add(pacer, 0, (5,), 6.0, is_last=True) == (4, 5), "the end waits for nothing"


@given(
    num_streams=st.integers(1, 50),
    gaps=st.lists(st.floats(0, 0.2), min_size=1, max_size=40),
    flushes=st.sets(st.integers(0, 39)),
)
def test_tokens_keep_their_order_and_none_is_lost(num_streams, gaps, flushes):
    pacer = make_pacer(num_streams)
    now, got = 3.0, []
    for index, gap in enumerate(gaps):
        now += gap
        if index in flushes:
            got += [token for _, tokens in pacer.due(now) for token in tokens]
        got += add(pacer, 0, (index,), now, is_last=index == len(gaps) - 1)
    assert got == list(range(len(gaps)))
    assert not pacer.is_holding
