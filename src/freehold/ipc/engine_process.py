"""The process that schedules and computes. AsyncEngine runs it as a module; never run it by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import zmq

from freehold.contract.errors import EngineStuck, FreeholdError
from freehold.ipc import protocol as msg
from freehold.ipc.adapter_loads import AdapterLoads, Adapters
from freehold.ipc.engine_setup import EngineSetup
from freehold.ipc.jobs import Jobs
from freehold.ipc.procedures import Procedures
from freehold.ipc.reports import Reports, hold_seconds
from freehold.memory import AuditError
from freehold.memory.events import CacheEvent
from freehold.memory.tiers.counts import count_tiers
from freehold.runtime.assembly import Assembly, assemble
from freehold.runtime.storage_backend import Backend, StorageBackend
from freehold.scheduler.parked import GrammarCompiler, Parked
from freehold.scheduler.request import Request
from freehold.scheduler.results import StepOutput
from freehold.scheduler.scheduler import PauseMode, Scheduler
from freehold.store.store import StoreUnavailable

STATS_INTERVAL_S = 0.25
RETRY_MS = 200  # between polls of a stuck engine
IDLE_POLL_MS = 500
TRANSFER_POLL_MS = 5
HEARTBEAT_S = 1.0
COMMANDS_MAX = 256  # handled between two iterations
ORDERS = {"pause", "resume", "update_weights"}  # run once no step is in flight


class EngineLoop:
    """Receives commands, runs the scheduler and reports its results. Ends with its parent.

    Nothing here waits long for the engine: while it computes or hangs, commands are still received, and aborted or
    timed-out requests are answered. Orders, which need an idle engine, wait in their own queue.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        socket: zmq.Socket[bytes],
        parent: int,
        storage: StorageBackend,
        publish: Callable[[Sequence[CacheEvent]], None] = lambda events: None,
        grammars: GrammarCompiler | None = None,
        adapters: Adapters | None = None,
    ):
        self._scheduler = scheduler
        self._socket = socket
        self._parent = parent
        self._publish = publish  # receives cache events
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self._parked = Parked(grammars, self._wake_up, scheduler.config)
        self._adapters = AdapterLoads(adapters)
        self._storage = storage
        self._procedures = Procedures(scheduler, storage, self._parked, self._adapters)
        self._unanswered: dict[int, Future[Any]] = {}  # by call number
        self._orders: deque[msg.Call] = deque()
        self._order: Future[Any] | None = None  # result of the order that has started
        self._jobs = Jobs()
        self._reports = Reports(hold_seconds(scheduler.config))
        self._stopping = False
        self._stats_due = 0.0
        self._heartbeat_due = 0.0
        self._audit: Iterator[None] | None = None  # rest of the audit started when the engine became idle
        self._stuck: str | None = None

    def run(self) -> None:
        self._scheduler.memory.epochs.bind_thread()
        while not self._stopping and os.getppid() == self._parent:
            self.turn()

    def turn(self) -> None:
        """Handle commands, then run one scheduler iteration if there is work."""
        self._beat()
        self._take_commands()
        self._answer()
        self._admit_parked()
        self._storage.settle()
        self._scheduler.draining = bool(self._orders)
        # Requests queued behind a pause can still time out.
        if self._scheduler.has_work or self._scheduler.requests or self._scheduler.memory.awaits_transfers:
            self._step()
        self._carry_out_orders()
        if self._jobs.go_on() and self._audit is not None:
            self._audit = self._scheduler.auditing()
        self._answer()
        if self._scheduler.memory.events is not None:
            self._publish(self._scheduler.memory.events.take())

    def _beat(self) -> None:
        """Send a heartbeat, so that the parent detects a hang."""
        now = time.monotonic()
        if now >= self._heartbeat_due:
            self._heartbeat_due = now + HEARTBEAT_S
            self._send(msg.Progress([], [], {}, [], stats=self._stats()))

    def _step(self) -> None:
        if self._scheduler.has_work:
            self._audit = self._scheduler.auditing()
        self._report(self._scheduler.step())
        stuck, was_stuck = self._scheduler.stuck, self._stuck
        self._stuck = stuck
        if stuck is not None and was_stuck is None:
            print(f"freehold: stuck: {stuck}", file=sys.stderr, flush=True)
        if stuck is not None:
            self._tell()
            self._socket.poll(RETRY_MS)

    @property
    def _may_order(self) -> bool:
        """Return whether the previous order has ended."""
        return self._order is None or self._order.done()

    def _take_commands(self) -> None:
        """Receive pending commands, up to COMMANDS_MAX; while idle, wait for one."""
        has_orders = bool(self._orders) and self._may_order
        if not self._scheduler.has_work and not has_orders and self._jobs.rest_s > 0:
            self._tell()
            self._rest()
        for _ in range(COMMANDS_MAX):
            if not self._socket.poll(0):
                return
            self._take(msg.decode_command(self._socket.recv()))

    def _rest(self) -> None:
        """Audit all pages while idle. A command interrupts the audit, which then restarts."""
        while self._audit is not None and not self._socket.poll(0):
            try:
                next(self._audit)
                continue
            except StopIteration:
                pass
            except AuditError as error:
                print(f"freehold: memory audit failed: {error}", file=sys.stderr, flush=True)
            self._audit = None
            self._send(msg.Progress([], [], {}, [], stats=self._stats()))
        if any(woken == self._woken for woken, _ in self._poller.poll(self._patience_ms())):
            os.read(self._woken, 4096)

    def _wake_up(self) -> None:
        """Wake the loop from another thread: an awaited result is ready."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it will wake anyway
            os.write(self._wake, b"!")

    def _patience_ms(self) -> int:
        """Return the poll timeout. It is short while queued requests may time out or page copies may complete."""
        if self._scheduler.memory.awaits_transfers:
            return TRANSFER_POLL_MS
        patience = 50 if self._scheduler.requests or self._parked else IDLE_POLL_MS
        return int(min(patience, 1 + 1000 * self._jobs.rest_s))

    def _take(self, command: msg.Command) -> None:
        if self._audit is not None:
            self._audit = self._scheduler.auditing()
        if isinstance(command, msg.Submit):
            self._submit(command)
        elif isinstance(command, msg.Abort):
            self._abort(command.id)
        elif isinstance(command, msg.Forget):
            self._scheduler.forget_session(command.session)
        elif isinstance(command, msg.Call) and command.procedure in ORDERS:
            self._orders.append(command)
        elif isinstance(command, msg.Call):
            self._start(command)
        elif isinstance(command, msg.Cancel):
            if (result := self._unanswered.pop(command.number, None)) is not None:
                result.cancel()
        else:
            self._stopping = True

    def _start(self, call: msg.Call) -> Future[Any]:
        """Run the call now, in slices or in another thread, and return a future of its result."""
        result = self._jobs.take(lambda: self._procedures.start(call), is_order=call.procedure in ORDERS)
        self._unanswered[call.number] = result
        result.add_done_callback(lambda _: self._wake_up())
        return result

    def _answer(self) -> None:
        """Reply to the calls that have finished."""
        for number, result in [one for one in self._unanswered.items() if one[1].done()]:
            del self._unanswered[number]
            error = result.exception()
            failure = None if error is None else msg.Failure.of(error)
            self._send(msg.Reply(number, None if error else result.result(), failure))

    def _carry_out_orders(self) -> None:
        """Run orders in sequence, once no step is in flight."""
        scheduler = self._scheduler
        while self._orders and self._may_order and (scheduler.in_flight_count == 0 or scheduler.stuck is not None):
            call = self._orders.popleft()
            if scheduler.in_flight_count == 0:
                self._order = self._start(call)
            else:
                self._send(msg.Reply(call.number, failure=msg.Failure.of(EngineStuck(str(scheduler.stuck)))))

    def _submit(self, command: msg.Submit) -> None:
        options = msgspec.structs.asdict(command.options)
        try:
            options["adapter"] = self._adapters.find(command.options.adapter)
            request = Request(
                id=command.id,
                prompt=np.frombuffer(command.prompt, np.int32),
                params=command.params,
                seed=command.seed,
                **options,
            )
            if self._parked.park(request, len(self._scheduler.queue), self._scheduler.lifecycle.clock()):
                return
        except FreeholdError as error:
            self._send(msg.Rejected(command.id, msg.Failure.of(error)))
            return
        self._add(request)

    def _add(self, request: Request) -> None:
        try:
            self._scheduler.add(request)
        except FreeholdError as error:
            self._send(msg.Rejected(request.id, msg.Failure.of(error)))
        else:
            self._send(msg.Accepted(request.id))

    def _admit_parked(self) -> None:
        """Pass requests to the scheduler whose grammar is ready, or whose time is up: it ends them."""
        for request, error in self._parked.ready(self._scheduler.lifecycle.clock()):
            if error is None:
                self._add(request)
            else:
                self._send(msg.Rejected(request.id, msg.Failure.of(error)))

    def _abort(self, name: str) -> None:
        request = self._parked.take(name)
        if request is not None:
            self._add(request)
        self._scheduler.abort(name)

    def _report(self, output: StepOutput) -> None:
        now = time.monotonic()
        for request in output.ended:
            self._procedures.remember(request)
        self._reports.add(output, now)
        if now >= self._stats_due:
            self._stats_due = now + STATS_INTERVAL_S
            self._tell(self._stats())
        elif self._reports.is_due(now):
            self._tell()

    def _tell(self, stats: msg.Stats | None = None) -> None:
        """Send all progress on tokens, and `stats`."""
        progress = self._reports.take(stats)
        if progress is not None:
            self._socket.send(msg.encode(progress))

    def _stats(self) -> msg.Stats:
        scheduler = self._scheduler
        tiers = scheduler.memory.tiers
        audit_error = None if scheduler.audit_error is None else str(scheduler.audit_error)
        return msg.Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.queue),
            steps=scheduler.memory.epochs.submitted,
            sampled_tokens=scheduler.results.token_count,
            retractions=scheduler.lifecycle.retraction_count,
            evicted_pages=scheduler.memory.tree.evictor.evicted_page_count,
            tiers=None if tiers is None else count_tiers(tiers),
            pages={
                group.name: scheduler.memory.counts(number).as_dict()
                for number, group in enumerate(scheduler.memory.shape.groups)
            },
            drafted_tokens=scheduler.results.drafted_count,
            accepted_tokens=scheduler.results.accepted_count,
            grammars_compiling=len(self._parked),
            grammar_failures={"compile": self._parked.failure_count, "run": scheduler.results.refused_count},
            storage_trouble=self._storage.trouble,
            unwell=audit_error or self._stuck,
        )

    def _send(self, report: msg.Report) -> None:
        """Send a report after the progress that preceded it."""
        self._tell()
        self._socket.send(msg.encode_reply(report) if isinstance(report, msg.Reply) else msg.encode(report))


def assembled(setup: EngineSetup) -> tuple[Assembly, StorageBackend]:
    """Return an engine in the operator's last configuration, and its storage. If it has served before, it starts even
    without an unavailable storage or adapter. Raises what `assemble` raises."""
    config = wanted = setup.config
    if setup.has_served:
        config = dataclasses.replace(
            config, hicache_storage_backend=None, hicache_storage_location=None, lora_modules=(),
            enable_lora=wanted.adapts,
        )  # fmt: skip
    assembly = assemble(config, weights=setup.weights)
    storage = StorageBackend(assembly.scheduler.memory, assembly.mover, Backend.of(config))
    if setup.has_served:
        if (backend := Backend.of(wanted)) is not None:
            storage.attach_again(backend)
        if assembly.adapters is not None:
            assembly.adapters.load_again(wanted.adapter_paths)
    if setup.paused is not None:
        assembly.scheduler.pause(PauseMode(setup.paused))
    return assembly, storage


def main(address: str, setup: str, parent: int) -> None:
    """Run the engine. `address` is the parent's socket, `setup` an encoded EngineSetup, `parent` its process id, passed
    because the parent may die before this process could ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which drains and sends Stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The engine's thread needs the interpreter for microseconds at a time, and should get it immediately.
    sys.setswitchinterval(0.0005)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(address)
        try:
            assembly, storage = assembled(EngineSetup.decode(setup))
        except Exception as error:
            is_expected = isinstance(error, (FreeholdError, ValueError, OSError, StoreUnavailable))
            if not is_expected:
                traceback.print_exc()
            words = str(error) if is_expected else f"{type(error).__name__}: {error}"
            socket.send(msg.encode(msg.Failed(words)))
            return
        shape = assembly.scheduler.memory.shape
        socket.send(
            msg.encode(
                msg.Ready(
                    model_path=str(assembly.path),
                    architecture=assembly.spec.architecture,
                    vocab_size=assembly.spec.vocab_size,
                    max_model_len=shape.token_limit,
                    capacity_tokens=shape.page_count * shape.page_size,
                    hidden_size=assembly.spec.hidden_size,
                    cpu_isa=assembly.cpu_isa,
                    quantized=assembly.quantized,
                )
            )
        )
        gc.collect()
        gc.freeze()  # the model and its tables are permanent: exclude them from later collections
        EngineLoop(
            assembly.scheduler, socket, parent, storage, assembly.publish, assembly.grammars, assembly.adapters
        ).run()
        assembly.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
