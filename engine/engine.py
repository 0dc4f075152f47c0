"""The engine: requests in, text out. Everything here runs on the event loop.

Its step loop plans, launches, awaits and commits steps. `ActiveRequests` queues the requests and delivers
the text of what a step computed.
"""

import asyncio
import faulthandler
import importlib
import logging
import time
from collections import abc, deque
from contextlib import suppress
from functools import partial

from engine.active_requests import ActiveRequests
from engine.config import EngineConfig
from engine.constraints.grammar import GrammarCompiler
from engine.constraints.prepare import prepare
from engine.counters import Counters
from engine.device.thread import DeviceThread
from engine.errors import DeviceLost, EngineDead, StepFailed
from engine.kv_events import KVEvents
from engine.listener import StepListener
from engine.model_info import ModelInfo
from engine.outputs import StepOutput, StepPlan
from engine.profile import Profile
from engine.record.writer import Recorder
from engine.request import Request
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import RequestChain
from engine.stats import EngineObserver, EngineStats, EngineView, NullObserver
from engine.stream import RequestStream
from engine.text.tokenizer_pool import TokenizerPool
from engine.view import cells_of, view_of
from engine.watchdog import CHECK_SECONDS, Watchdog

logger = logging.getLogger("monoloop.engine")

LAG_TIMER_SECONDS = 0.010
STDERR = 2  # its file descriptor
# One entry per listener: it opens the listener, or returns None if the settings do not switch it on.
LISTENERS: tuple[abc.Callable[[EngineConfig], StepListener | None], ...] = (
    Recorder.from_config,
    KVEvents.from_config,
)


class Engine:
    """Runs requests in continuous batches. Create it with Engine.start(), end it with drain() and stop()."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelInfo,
        tokenizer: TokenizerPool,
        device: DeviceThread,
        grammars: GrammarCompiler,
        token_budget: int,
        observer: EngineObserver | None = None,
        listeners: abc.Sequence[StepListener] = (),
    ) -> None:
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self._device = device
        self.profile = Profile(device)
        self._grammars = grammars
        self._observer = observer or NullObserver()
        self._listeners = tuple(listeners)
        self._scheduler = Scheduler(
            num_pages=model.num_pages,
            page_size=model.page_size,
            kv_windows=model.kv_windows,
            has_states=model.has_states,
            short_context=model.short_context,
            max_num_seqs=config.max_num_seqs,
            token_budget=token_budget,
            max_model_len=model.max_model_len,
            run_ahead=config.run_ahead,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            overcommit=config.overcommit,
            priority_seconds=config.priority_seconds,
            target_step_seconds=config.target_step_seconds,
            with_prefix_cache=config.prefix_cache,
            eos_token_ids=frozenset(model.eos_token_ids),
        )
        self._scheduler.prefix_cache.listeners = self._listeners
        self._loop = asyncio.get_running_loop()
        self._counters = Counters(time.perf_counter())
        self._requests = ActiveRequests(
            config,
            model,
            tokenizer,
            self._scheduler,
            self._counters,
            self._observer,
            self._listeners,
            self._wake_up,
        )
        self._delivery = self._requests.delivery
        self._in_flight: deque[StepPlan] = deque()
        self._wake = asyncio.Event()
        self._has_ended = asyncio.Event()  # the step loop, by a fault or by stop()
        self._is_stuck = False
        self._death = EngineDead("The engine has stopped after a fault.")
        parts = {
            "device": lambda: device.progress() if self._in_flight else None,
            "tokenizer": tokenizer.progress,
            "detokenizer": self._delivery.progress,
        }
        self._watchdog = Watchdog(parts, config.watchdog_timeout_seconds)
        self._timers = [
            asyncio.create_task(self._measure_lag(), name="loop lag"),
            asyncio.create_task(self._watch(), name="watchdog"),
        ]

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        observer: EngineObserver | None = None,
        on_progress: abc.Callable[[str], None] | None = None,
    ) -> "Engine":
        """Find and load the model, start the threads and the step loop.

        `on_progress` gets one line per stage. Raises ModelError, or ValueError naming a setting.
        """
        listeners = open_listeners(config)
        try:
            # It imports torch, which takes seconds: neither when this module is imported nor on the loop.
            startup = await asyncio.to_thread(importlib.import_module, "engine.startup")
            parts = await startup.load(config, on_progress or (lambda line: None))
            if listeners:
                fingerprint = await asyncio.to_thread(parts.fingerprint)
                for listener in listeners:
                    listener.started(parts.model, config, parts.token_budget, fingerprint)
        except BaseException:
            for listener in listeners:
                listener.discard()
            raise
        return cls(
            config,
            parts.model,
            parts.tokenizer,
            parts.device,
            parts.grammars,
            parts.token_budget,
            observer,
            listeners,
        )

    # Requests

    async def prepare(self, requests: abc.Sequence[Request]) -> list[Request]:
        """Return requests with their constraints, for submit(); slow work runs in threads.

        Raises InvalidRequest. Requests without constraints need no preparation.
        """
        return await prepare(requests, self.tokenizer, self._grammars, self.model.eos_token_ids)

    def submit(self, request: Request) -> RequestStream:
        """Check and queue a request; one with constraints must come from prepare().

        Raises InvalidRequest or ContextLengthExceeded (it can never run), QueueFull, Draining, EngineDead.
        """
        return self.submit_group([request])[0]

    def submit_group(
        self, requests: abc.Sequence[Request], chain: RequestChain | None = None
    ) -> list[RequestStream]:
        """Check and queue requests with one prompt, all or none; the prompt is computed once.

        Raises as submit() does, but for later requests of a `chain` never QueueFull, and Draining only after
        drain() has timed out.
        """
        self.check_alive()
        return self._requests.submit(requests, chain)

    def begin_chain(self) -> RequestChain:
        """Begin a chain of requests that depend on each other; drain() waits for its end_chain().

        Raises Draining, EngineDead.
        """
        self.check_alive()
        return self._requests.begin_chain()

    def end_chain(self, chain: RequestChain) -> None:
        """End a chain: no more of its requests will come."""
        self._requests.end_chain(chain)

    # State

    @property
    def is_alive(self) -> bool:
        """True while the step loop runs; once it is dead, no request will finish."""
        return not self._has_ended.is_set()

    def check_alive(self) -> None:
        """Raise EngineDead, with the reason, if the step loop has ended."""
        if not self.is_alive:
            raise EngineDead(*self._death.args)

    @property
    def is_draining(self) -> bool:
        """True if new requests are refused because the engine is shutting down."""
        return self._requests.is_draining

    def stats(self) -> EngineStats:
        """Return a snapshot of live state."""
        return self._counters.snapshot(
            self._scheduler, time.perf_counter(), alive=self.is_alive, draining=self.is_draining
        )

    def view(self, max_sequences: int, max_cells: int) -> EngineView:
        """Return a snapshot with up to `max_sequences` sequences and `max_cells` cells of pages."""
        now = time.perf_counter()
        sequences = [view_of(sequence, now) for sequence in self._scheduler.first_sequences(max_sequences)]
        return EngineView(self.stats(), sequences, cells_of(self._scheduler.pool, max_cells))

    async def wait_dead(self) -> None:
        """Wait until the step loop has ended, by a fault or by stop()."""
        await self._has_ended.wait()

    # Shutdown

    async def drain(self, timeout_seconds: float | None = None) -> None:
        """Refuse new requests and wait for the running ones; after the time-out they end with Draining."""
        await self._requests.drain(timeout_seconds)

    async def stop(self) -> None:
        """End all running requests, then the step loop and the threads, except one that is stuck."""
        if self.is_alive:
            self._death = EngineDead("The engine has been stopped.")
        self._requests.close()
        self._has_ended.set()
        for timer in self._timers:
            timer.cancel()
        await asyncio.wait(self._timers)
        for listener in self._listeners:
            await asyncio.to_thread(listener.close)
        if not self._is_stuck:
            await self._device.stop()
        self._delivery.stop()
        self._grammars.close()
        self.tokenizer.close()

    # The step loop

    def _wake_up(self) -> None:
        """Plan a step, if none is in flight whose end does it: once for all requests of this iteration."""
        if not self._wake.is_set():
            self._wake.set()
            self._loop.call_soon(self._advance)

    def _on_step(self, plan: StepPlan, output: StepOutput | BaseException) -> None:
        self._advance((plan, output))

    def _advance(self, done: tuple[StepPlan, StepOutput | BaseException] | None = None) -> None:
        """Commit a step that is `done`, then plan and launch ahead; its end comes back here."""
        if not self.is_alive:
            return
        try:
            if done is not None:
                self._complete_step(*done)
            self._launch_steps()
        except Exception as fault:
            logger.critical("the step loop died", exc_info=fault)
            self._die(fault if isinstance(fault, EngineDead) else self._death)

    def _die(self, error: EngineDead) -> None:
        """End the step loop and every request; no more are taken."""
        self._death = error
        self._has_ended.set()
        self._requests.fail_all(error)
        self.tokenizer.close()  # it may be what is stuck

    def _launch_steps(self) -> None:
        """Plan and launch steps until one has to be awaited, or there is no work."""
        while True:
            self._requests.reap()
            plan = self._scheduler.plan(time.perf_counter())
            if plan is not None:
                for listener in self._listeners:
                    listener.planned(plan, time.perf_counter())
                self._in_flight.append(plan)
                self._device.launch(plan, partial(self._on_step, plan))
            elif self._in_flight:
                self._device.flush()
            self._delivery.send()
            if self._in_flight and (plan is None or len(self._in_flight) > self.config.run_ahead):
                return
            if plan is None:
                self._scheduler.check_idle()
                self._counters.idle_meter.work_ended()
                self._wake.clear()
                return

    def _complete_step(self, plan: StepPlan, output: StepOutput | BaseException) -> None:
        self._in_flight.popleft()
        if isinstance(output, DeviceLost):
            raise output  # ends the step loop, and with it the engine
        if isinstance(output, BaseException):
            logger.error(
                "step %d failed; its %d requests end with an error",
                plan.step_id,
                plan.num_rows,
                exc_info=output,
            )
            for listener in self._listeners:
                listener.failed(plan, time.perf_counter())
            error = output if isinstance(output, StepFailed) else StepFailed("Computing this request failed.")
            for sequence in self._scheduler.fail(plan):
                self._requests.fail(sequence, error)
            return
        for listener in self._listeners:
            listener.completed(output)
        self._requests.add_output(plan, output, self._scheduler.commit(plan, output))
        self._counters.step(plan, output)
        self._observer.step_finished(
            output.end_seconds - output.start_seconds, plan.num_tokens, plan.num_rows
        )

    # Health

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self._check_threads()

    def _check_threads(self) -> None:
        """End the engine if one of its parts is stuck, or the device thread has ended."""
        if not self.is_alive:
            return
        stuck = self._watchdog.check()
        if not self._device.is_alive:
            self._die(EngineDead("The device thread has ended after a fault."))
        elif stuck is not None:
            self._is_stuck = stuck == "device"
            seconds = self.config.watchdog_timeout_seconds
            self._die(EngineDead(f"The {stuck} is stuck: it has made no progress for {seconds:g} s."))
        else:
            return
        logger.critical("%s All threads are shown below.", self._death)
        faulthandler.dump_traceback(STDERR)

    async def _measure_lag(self) -> None:
        """Measure how late a 10 ms timer fires, while there is work."""
        with suppress(asyncio.CancelledError):
            while True:
                if not self._requests:
                    self._counters.loop_lag_seconds = 0.0
                    await self._wake.wait()
                due = self._loop.time() + LAG_TIMER_SECONDS
                await asyncio.sleep(LAG_TIMER_SECONDS)
                self._counters.loop_lag_seconds = max(0.0, self._loop.time() - due)
                self._observer.loop_lag(self._counters.loop_lag_seconds)


def open_listeners(config: EngineConfig) -> list[StepListener]:
    """Open the listeners that the settings switch on. Raises ValueError, naming the setting."""
    listeners: list[StepListener] = []
    try:
        listeners.extend(listener for make in LISTENERS if (listener := make(config)) is not None)
    except BaseException:
        for listener in listeners:
            listener.discard()
        raise
    return listeners
