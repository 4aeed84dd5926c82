"""The loop that runs steps: one thread, one inbox of commands and device events.

It owns the slot table and the epoch: it checks and applies plans as they arrive, drives the round, settles
steps into boundaries, keeps those until the scheduler has committed them, and answers pings. It never blocks on
anything but its inbox, so whatever the device does, a ping is answered.
"""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, assert_never

import structlog

from stepahead.v1 import worker_pb2
from stepahead.worker import commands, convert, status
from stepahead.worker.epoch import Epoch
from stepahead.worker.step import Step, StepTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepahead.worker.runner import CacheShape
    from stepahead.worker.step_device import StepDevice

log = structlog.stdlib.get_logger()

Pong = worker_pb2.Pong

MAX_WAIT_S = 3600.0
"""Peers choose bounds freely; the platform's clock cannot wait for centuries."""


class Executor:
    """The host thread.

    Args:
        device: runs the steps.
        shape: of the batch and the cache.
        vocab_size: width of the logits.
        max_step_ns: bound of a step that states none, in nanoseconds of device time.
        resume_grace_ns: told to schedulers.
        worker_instance_id: told to schedulers.
        on_fatal: called on the host thread, once, when a thread of the worker has failed: the process must end.
    """

    def __init__(
        self,
        device: StepDevice,
        shape: CacheShape,
        *,
        vocab_size: int,
        max_step_ns: int,
        resume_grace_ns: int,
        worker_instance_id: str,
        on_fatal: Callable[[], object],
    ) -> None:
        self._device = device
        self._shape = shape
        self._vocab_size = vocab_size
        self._max_step_ns = max_step_ns
        self._resume_grace_ns = resume_grace_ns
        self._worker_instance_id = worker_instance_id
        self._on_fatal = on_fatal
        self._inbox: SimpleQueue[commands.Command] = SimpleQueue()
        self._epoch: Epoch | None = None
        self._thread = threading.Thread(target=self._run, name="stepahead-host", daemon=True)

    def start(self) -> None:
        """Starts the host thread."""
        self._thread.start()

    def submit(self, command: commands.Command) -> None:
        """Puts a command or event into the inbox. Any thread may call it; never blocks."""
        self._inbox.put(command)

    def close(self, timeout_s: float) -> bool:
        """Ends the host thread; whether it ended within `timeout_s` seconds."""
        self._inbox.put(commands.StopExecutor())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                command = self._next_command()
                if isinstance(command, commands.StopExecutor):
                    if self._epoch is not None:
                        self._epoch.round.release_held()
                    return
                if command is not None:
                    self._handle(command)
                if self._epoch is not None:
                    self._epoch.round.advance()
                self._check_step_age()
        except Exception as error:  # noqa: BLE001 - the outermost guard of the thread: report, then end the process
            self._die(error)

    def _next_command(self) -> commands.Command | None:
        """The next command, or None when a deadline of the round has passed."""
        epoch = self._epoch
        deadlines = (
            [] if epoch is None else [epoch.round.deadline_ns(), self._step_deadline_ns(self._device.running)]
        )
        deadline_ns = min((deadline for deadline in deadlines if deadline is not None), default=None)
        launched = self._device.oldest_launched
        if deadline_ns is not None:
            timeout_s = max(deadline_ns - time.monotonic_ns(), 0) / 1e9
        elif launched is not None:
            # It may start without an event here, so the watchdog looks up now and then.
            timeout_s = launched.max_step_ns / 2e9
        else:
            timeout_s = MAX_WAIT_S
        try:
            return self._inbox.get(timeout=min(timeout_s, MAX_WAIT_S))
        except Empty:
            return None

    def _handle(self, command: commands.Command) -> None:  # noqa: C901, PLR0912 - one case per kind of command
        epoch = self._epoch
        match command:
            case commands.StepEnded(step):
                step.ended = True
            case commands.PlanArrived(plan, read_ns):
                if epoch is not None:
                    epoch.take_plan(plan, read_ns)
            case commands.GateArrived(gate):
                if epoch is not None:
                    epoch.take_gate(gate)
            case commands.ForwardEnded():
                pass  # `advance` reads the step's clock
            case commands.PingArrived(nonce):
                if epoch is not None:
                    epoch.outlet.send(self._pong(epoch, nonce))
            case commands.DrainRequested(nonce):
                if epoch is not None:
                    epoch.drain(nonce)
            case commands.OpenEpoch():
                self._open(command)
            case commands.ResumeEpoch(outlet, last_completed_step_id):
                if epoch is not None:
                    epoch.resume(outlet, last_completed_step_id)
            case commands.CloseEpoch():
                self._forget_epoch()
            case commands.DeviceFailed(error):
                raise error
            case commands.StopExecutor():
                pass
            case _:
                assert_never(command)

    def _open(self, command: commands.OpenEpoch) -> None:
        self._forget_epoch()
        self._device.reset(command.worker_epoch)
        self._epoch = Epoch(
            command,
            self._device,
            self._shape,
            vocab_size=self._vocab_size,
            max_step_ns=self._max_step_ns,
            post=self.submit,
            identity=worker_pb2.SessionOpened(
                session_id=command.session_id,
                worker_instance_id=self._worker_instance_id,
                worker_epoch=command.worker_epoch,
                overlap_depth=command.overlap_depth,
                resume_grace_ns=self._resume_grace_ns,
            ),
        )
        self._epoch.announce()

    def _forget_epoch(self) -> None:
        if self._epoch is not None:
            self._epoch.round.release_held()
            self._epoch = None

    def _pong(self, epoch: Epoch, nonce: int) -> worker_pb2.RunStepsResponse:
        running = self._device.running
        if epoch.round.waits_for_gate:
            waiting = Pong.WAITING_GATE
        elif running is not None or not epoch.round.is_idle:
            waiting = Pong.WAITING_DEVICE
        else:
            waiting = Pong.WAITING_COMMAND
        age_ns = 0 if running is None else max(time.monotonic_ns() - running.started_ns, 1)
        return worker_pb2.RunStepsResponse(
            pong=Pong(
                nonce=nonce,
                waiting=waiting,
                last_completed_step_id=epoch.last_completed_step_id,
                running_step_age_ns=age_ns,
            )
        )

    def _step_deadline_ns(self, step: Step | None) -> int | None:
        """When the running step has used up its device time; None while none is at work."""
        if step is None or self._device.holds_ends:
            return None
        if step.sample_started_ns:
            forward_ns = step.forward_ended_ns - step.started_ns
            return step.sample_started_ns + step.max_step_ns - forward_ns
        return None if step.forward_ended_ns else step.started_ns + step.max_step_ns

    def _check_step_age(self) -> None:
        step = self._device.running
        deadline_ns = self._step_deadline_ns(step)
        if deadline_ns is not None and step is not None and time.monotonic_ns() > deadline_ns:
            raise StepTimeout(step.step_id, step.max_step_ns)

    def _die(self, error: Exception) -> None:
        """A dead device or host thread must never be a silent hang: say so, then let the process end."""
        incident_id = status.new_incident_id()
        running = self._device.running
        epoch = self._epoch
        step_id = running.step_id if running is not None else 0
        log.error("worker_failed", incident_id=incident_id, step_id=step_id, exc_info=error)
        if epoch is not None:
            if running is None or running.worker_epoch != epoch.worker_epoch:
                step_id = epoch.last_accepted_step_id
            text = f"{type(error).__name__} in step {step_id}, incident {incident_id}"
            epoch.outlet.send(convert.failed_message(step_id, text))
            epoch.outlet.end(status.internal_error(incident_id))
        self._on_fatal()
