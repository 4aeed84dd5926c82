"""A scheduler and its workers as child processes on this machine.

Order matters on both ends. Start: workers first (their ports are chosen by the system), the scheduler once
they have loaded. Stop: the scheduler first, because draining needs its workers; then the workers.
"""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from stepahead.cli.announcements import Failed, Listening, Progress, Ready, Refused
from stepahead.cli.child import Child
from stepahead.cli.failures import StackError, StackInterrupted
from stepahead.cli.restarts import RestartPolicy, Restarts
from stepahead.cli.stack_options import StackOptions, num_cores, scheduler_arguments, worker_arguments

_T = TypeVar("_T")

# How long a failure waits for the end of a child that may have caused it.
_LAST_WORDS_S = 0.5

# How long a service may take to end beyond what it was told, before it is killed.
_STOP_GRACE_S = 10.0

# The same where nothing is waited for; and when to say so again to a scheduler that has begun to drain.
_HASTE_S = 2.0
_SECOND_SIGNAL_S = 0.2

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ServiceCommands:
    """How each service is started; tests put small scripts here."""

    worker: tuple[str, ...] = (sys.executable, "-m", "stepahead.worker")
    scheduler: tuple[str, ...] = (sys.executable, "-m", "stepahead.scheduler")


@dataclass(frozen=True, slots=True)
class StackReady:
    """The stack serves at `address`."""

    address: str
    scheduler: Ready
    workers: tuple[Ready, ...]
    scheduler_pid: int
    worker_pids: tuple[int, ...]
    """The processes, for measurements."""


class StackView(Protocol):
    """What is told on the way."""

    def worker_progress(self, name: str, progress: Progress) -> None:
        """A worker has loaded more."""
        ...

    def worker_ready(self, name: str) -> None:
        """A worker takes work."""
        ...

    def worker_lost(self, error: StackError) -> None:
        """A worker has ended by itself; the others go on."""
        ...

    def worker_restarts(self, name: str, error: StackError, restarts: Restarts, delay_s: float) -> None:
        """A worker has ended by itself and is started again in `delay_s` seconds."""
        ...

    def worker_back(self, name: str) -> None:
        """A worker that was started again takes work."""
        ...

    def failed(self, error: StackError) -> None:
        """The stack ends because of this."""
        ...

    def stopping(self) -> None:
        """The stack stops, which may take as long as the accepted requests do."""
        ...


class Stack:
    """The children of one run.

    Args:
        options: what to run.
        view: is told what happens.
        log_dir: where their logs go; None: to our stderr.
        commands: how they are started.
        restart: whether a worker that ends by itself is started again, and how often; None: it is not.
    """

    def __init__(
        self,
        options: StackOptions,
        view: StackView,
        *,
        log_dir: Path | None = None,
        commands: ServiceCommands | None = None,
        restart: RestartPolicy | None = None,
    ) -> None:
        self._options = options
        self._view = view
        self._log_dir = log_dir
        self._commands = commands or ServiceCommands()
        self._restart = restart
        self._workers: list[Child] = []
        self._addresses: list[str] = []
        self._scheduler: Child | None = None
        self._keepers: list[asyncio.Task[StackError]] = []
        self._is_failed = False
        self._is_stopping = False
        self._in_haste = False

    async def start(self) -> StackReady:
        """Starts everything and waits until it serves. Raises StackError; call `stop` in any case."""
        options = self._options
        arguments = worker_arguments(options, num_cores())
        for index in range(options.workers):
            name = "worker" if options.workers == 1 else f"worker {index + 1}"
            self._workers.append(await self._spawn(name, (*self._commands.worker, *arguments)))
        workers = await _gather([self._until_ready(child) for child in self._workers])
        self._addresses = [address for address, _ in workers]
        scheduler_argv = (*self._commands.scheduler, *scheduler_arguments(options, self._addresses))
        self._scheduler = await self._spawn("scheduler", scheduler_argv)
        address, ready = await _unless_death(self._until_ready(self._scheduler), _watch(self._workers))
        pids = tuple(child.pid for child in self._workers)
        return StackReady(address, ready, tuple(facts for _, facts in workers), self._scheduler.pid, pids)

    async def watch(self) -> None:
        """Waits until the scheduler or the last worker is gone by itself, then raises StackError about it."""
        scheduler = set[asyncio.Task[StackError]]()
        if self._scheduler is not None:
            scheduler.add(asyncio.create_task(self._scheduler.death()))
        workers = set(self._keep_all())
        try:
            while True:
                done, _ = await asyncio.wait(scheduler | workers, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    workers.discard(each)
                    if each in scheduler or not workers:
                        raise each.result()
                    self._view.worker_lost(each.result())
        finally:
            # Those who keep the workers go on: a drain needs them, and how often they have tried.
            await _cancel(scheduler)

    def _keep_all(self) -> list[asyncio.Task[StackError]]:
        """One task per worker, the same ones until the stack has stopped."""
        if not self._keepers:
            self._keepers = [asyncio.create_task(self._keep(index)) for index in range(len(self._workers))]
        return self._keepers

    async def _keep(self, index: int) -> StackError:
        """Starts a worker again each time it ends by itself; returns why, once it is gone for good."""
        clock = asyncio.get_running_loop().time
        ready_s = clock()
        error = await self._workers[index].death()
        if self._restart is None:
            return error
        restarts = Restarts(self._restart)
        while (delay_s := restarts.delay_after(clock() - ready_s)) is not None:
            if not self._is_stopping:
                self._view.worker_restarts(self._workers[index].name, error, restarts, delay_s)
            await asyncio.sleep(delay_s)
            try:
                await self._start_again(index)
                ready_s = clock()
                error = await self._workers[index].death()
            except StackError as failure:
                ready_s, error = clock(), failure
        often = (
            f"it was started again {restarts.num_in_row} times and never served for {self._restart.steady_s:g} s"
        )
        return StackError(f"{error.message}; {often}", log_lines=error.log_lines, advice=error.advice)

    async def _start_again(self, index: int) -> None:
        """Starts a worker in the place of one that ended. Raises StackError if it does not become ready."""
        # At its old address, which is where the scheduler looks for it.
        arguments = worker_arguments(self._options, num_cores(), listen=self._addresses[index])
        name = self._workers[index].name
        self._workers[index] = await self._spawn(name, (*self._commands.worker, *arguments))
        await self._until_ready(self._workers[index])
        if not self._is_stopping:
            self._view.worker_back(name)

    async def stop(self) -> None:
        """Stops the scheduler, then the workers. Raises StackError if one had to be killed or failed."""
        self._is_stopping = True
        if self._scheduler is not None and self._scheduler.running and not self._is_failed:
            self._view.stopping()
        scheduler = [] if self._scheduler is None else [self._scheduler]
        keeping = asyncio.create_task(self._keep_for_drain())
        problems = await self._stop_children(scheduler, self._options.drain_timeout + _STOP_GRACE_S)
        if keeping.done() and not keeping.cancelled() and (lost := keeping.result()) is not None:
            problems.append(lost.message)
        await _cancel([keeping, *self._keepers])
        problems += await self._stop_children(self._workers, _STOP_GRACE_S)
        if problems:
            raise StackError("; ".join(problems))

    async def _keep_for_drain(self) -> StackError | None:
        """Starts workers again that accepted requests wait for. Says why once none is left, and waits no longer."""
        in_vain = self._restart is None or self._is_failed or self._in_haste or not self._workers
        if self._scheduler is None or in_vain:
            await _cancel(self._keepers)
            return None
        errors = await asyncio.gather(*self._keep_all())
        self._is_failed = True
        self._view.failed(errors[-1])
        self._scheduler.send_signal(signal.SIGTERM)  # a second one: what it has cannot finish
        return errors[-1]

    async def stop_after(self, error: Exception) -> None:
        """Says why and stops without waiting for requests. `error` gets a note of what goes wrong meanwhile."""
        self._is_failed = True
        if isinstance(error, StackError):
            self._view.failed(error)
        haste = asyncio.get_running_loop().call_later(_SECOND_SIGNAL_S, self.hurry)
        try:
            await self.stop()
        except StackError as later:
            error.add_note(later.message)
        finally:
            haste.cancel()

    def hurry(self) -> None:
        """Cuts a stop short: the scheduler tells its requests that they end; what hangs is killed."""
        self._in_haste = True
        for keeper in self._keepers:
            keeper.cancel()
        for child in self._children():
            child.send_signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(_HASTE_S, self.kill)

    def kill(self) -> None:
        """Ends everything at once."""
        for child in self._children():
            child.send_signal(signal.SIGKILL)

    def _children(self) -> list[Child]:
        return [*self._workers, *([self._scheduler] if self._scheduler is not None else [])]

    async def _spawn(self, name: str, argv: Sequence[str]) -> Child:
        log_path = None if self._log_dir is None else self._log_dir / f"{name.replace(' ', '-')}.log"
        return await Child.start(name, argv, log_path)

    async def _until_ready(self, child: Child) -> tuple[str, Ready]:
        address = ""
        async for announcement in child.announcements():
            match announcement:
                case Listening():
                    address = announcement.address
                case Progress():
                    self._view.worker_progress(child.name, announcement)
                case Ready():
                    if child is not self._scheduler:
                        self._view.worker_ready(child.name)
                    return address, announcement
                case Refused():
                    # It would ask again for ever, and a worker of ours does not change.
                    raise StackError(
                        f"the scheduler refused the worker at {announcement.worker}: {announcement.message}",
                        advice=child.where_its_log_is(),
                    )
                case Failed():
                    # The process ends by itself after this; its exit code and log complete the story.
                    break
        raise await child.death()

    async def _stop_children(self, children: Sequence[Child], grace_s: float) -> list[str]:
        running = [child for child in children if child.running]
        for child in running:
            child.send_signal(signal.SIGTERM)
        problems = await _gather([self._await_stop(child, grace_s) for child in running])
        return [problem for problem in problems if problem is not None]

    async def _await_stop(self, child: Child, grace_s: float) -> str | None:
        try:
            return_code = await asyncio.wait_for(child.wait(), grace_s)
        except TimeoutError:
            child.send_signal(signal.SIGKILL)
            await child.wait()
            return f"{child.name} did not stop within {grace_s:g} s and was killed"
        # A child that was still starting has no handler yet and ends by the signal itself.
        if return_code in (0, -signal.SIGTERM, -signal.SIGKILL):
            return None
        return f"{(await child.death()).message} while stopping"


async def run_stack(stack: Stack, body: Callable[[StackReady], Awaitable[_T]], *, ends_process: bool = False) -> _T:
    """Starts the stack, runs `body` while it serves, and stops it.

    The first SIGINT, SIGTERM or SIGHUP cancels `body` and stops the stack in order, the second does not wait for
    requests, the third kills it; all end in StackInterrupted. A child that ends by itself cancels `body` and ends
    in StackError. With `ends_process` the process ends next, and signals that come too late for the stack are
    ignored: how it ends is settled.
    """
    served = False

    async def serve() -> _T:
        nonlocal served
        ready = await stack.start()
        served = True
        return await _unless_death(body(ready), stack.watch())

    loop = asyncio.get_running_loop()
    work = asyncio.create_task(serve())
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            work.cancel()
        elif len(received) == 2:
            stack.hurry()
        else:
            stack.kill()

    # A closed terminal stops the stack as Ctrl-C does, except under nohup, which ignores its signal.
    stop_signals = [each for each in _STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    for signal_number in stop_signals:
        loop.add_signal_handler(signal_number, on_signal, signal_number)
    try:
        result = await work
        await stack.stop()
    except asyncio.CancelledError:
        await stack.stop()
        if not received:
            raise
        raise StackInterrupted(received[0], killed=len(received) > 1, served=served) from None
    except Exception as error:
        await stack.stop_after(error)
        raise
    else:
        return result
    finally:
        # Blocked meanwhile: removing a handler brings back the default, which ends the process by the signal.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
        for signal_number in stop_signals:
            loop.remove_signal_handler(signal_number)
            if ends_process:
                signal.signal(signal_number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


async def _watch(children: Sequence[Child]) -> None:
    """Waits until one of them has ended, and raises what is known about it."""
    deaths = [asyncio.create_task(child.death()) for child in children]
    try:
        done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        raise next(iter(done)).result()
    finally:
        await _cancel(deaths)


async def _unless_death(work: Awaitable[_T], watch: Awaitable[None]) -> _T:
    """The result of `work`, unless `watch` raises first."""
    work_task = asyncio.ensure_future(work)
    watch_task = asyncio.ensure_future(watch)
    try:
        await asyncio.wait({work_task, watch_task}, return_when=asyncio.FIRST_COMPLETED)
        if not watch_task.done() and work_task.exception() is not None:
            # The work may have failed because a child is just about to end: its last words explain more.
            await asyncio.wait({watch_task}, timeout=_LAST_WORDS_S)
        if watch_task.done():
            watch_task.result()
        return await work_task
    finally:
        await _cancel([work_task, watch_task])


async def _gather(works: Sequence[Awaitable[_T]]) -> list[_T]:
    """All results, or the first exception; what still runs then is cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
