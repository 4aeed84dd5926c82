"""A stream of launched work: what is told, when, on which thread, and what the step clock says (C5, V2)."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any, cast

import numpy as np

from stepahead.worker.launch_stream import Instant, LaunchStream
from stepahead.worker.launched_device import LaunchedDevice
from stepahead.worker.runner import StepBatch, StepSamples
from stepahead.worker.step import Step
from tests.worker.device_points import HandDevice


class Trace:
    """What happened, in order; `wait` takes the next entry."""

    def __init__(self) -> None:
        self._entries: SimpleQueue[Any] = SimpleQueue()

    def put(self, entry: Any) -> None:
        self._entries.put(entry)

    def wait(self) -> Any:
        return self._entries.get(timeout=10)

    def empty(self) -> bool:
        return self._entries.empty()


def test_the_next_step_is_launched_before_the_device_has_ended_this_one() -> None:
    device, launched, told = HandDevice(), Trace(), Trace()
    stream = LaunchStream(device.mark, told.put)
    stream.start()
    for name in ("a", "b"):
        stream.launch(
            lambda name=name: launched.put((name, threading.get_ident())),
            on_begin=lambda instant, name=name: told.put((f"{name} began", instant, threading.get_ident())),
            on_end=lambda instant, name=name: told.put((f"{name} ended", instant, threading.get_ident())),
        )
    (first, launching), (second, also_launching) = launched.wait(), launched.wait()
    assert (first, second, launching) == ("a", "b", also_launching)
    device.wait_marked(4)
    assert told.empty()
    for point, at_ns in zip(device.points, (100, 350, 352, 900), strict=True):
        point.reach(at_ns)
    found = [told.wait() for _ in range(4)]
    assert [name for name, _, _ in found] == ["a began", "a ended", "b began", "b ended"]
    instants: list[Instant] = [instant for _, instant, _ in found]
    assert [instant.since_last_ns for instant in instants] == [0, 250, 2, 548]
    assert [instant.work_follows for instant in instants] == [True, True, True, False]
    assert sorted(instant.at_ns for instant in instants) == [instant.at_ns for instant in instants]
    assert len({thread for _, _, thread in found} | {launching}) == 2
    assert stream.close(10)


def test_ends_of_submitted_work_come_in_order_with_launched_work() -> None:
    device, told = HandDevice(), Trace()
    stream = LaunchStream(device.mark, told.put)
    stream.start()
    stream.submit(lambda: told.put("task"), lambda: told.put("end"))
    stream.submit(lambda: told.put("says nothing"))
    assert (told.wait(), told.wait()) == ("task", "says nothing")
    assert told.empty()
    device.points[0].reach()
    assert told.wait() == "end"
    assert stream.close(10)


def test_a_launch_that_fails_is_told_behind_what_was_launched_before() -> None:
    """Nothing behind a fault is launched, and no end behind it is told."""
    device, told = HandDevice(), Trace()
    stream = LaunchStream(device.mark, told.put)
    error = ValueError("cannot launch")

    def broken() -> None:
        raise error

    stream.submit(lambda: None, lambda: told.put("end of the work before"))
    stream.submit(broken, lambda: told.put("end of the fault"))
    stream.submit(lambda: told.put("launched behind it"))
    stream.start()
    device.wait_marked(1)
    device.points[0].reach()
    assert [told.wait(), told.wait()] == ["end of the work before", error]
    assert stream.close(10)
    assert told.empty()


def test_a_fault_of_the_device_shows_at_its_point_and_ends_the_telling() -> None:
    device, told = HandDevice(), Trace()
    stream = LaunchStream(device.mark, told.put)
    stream.start()
    for name in ("a", "b"):
        stream.submit(lambda: None, lambda name=name: told.put(name))
    device.wait_marked(2)
    error = RuntimeError("illegal address")
    device.points[0].fail(error)
    device.points[1].reach()
    assert told.wait() is error
    assert stream.close(10)
    assert told.empty()


def test_close_says_when_the_device_hangs() -> None:
    device = HandDevice()
    stream = LaunchStream(device.mark, lambda _: None)
    stream.start()
    stream.submit(lambda: None, lambda: None)
    assert not stream.close(0.01)
    device.points[0].reach()
    assert stream.close(10)


class LaunchedFake:
    """Follows `LaunchingRunner` as far as the device asks: results are taken later."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def forward(self, batch: StepBatch) -> None:
        self._trace.put(("forward", batch))

    def launch_sample(self, batch: StepBatch) -> Any:
        def take() -> StepSamples:
            self._trace.put(("take", batch))
            return StepSamples(np.array([7]), np.zeros(1, np.uint8))

        return take

    def reset(self) -> None:
        self._trace.put(("reset", None))


def make_step(step_id: int, worker_epoch: int = 1) -> Step:
    return Step(
        step_id=step_id, worker_epoch=worker_epoch, in_place=False, batch=None, rows=None, gate=None,
        gate_wait_ns=0, max_step_ns=10**9, read_ns=0,
    )  # fmt: skip


class Bench:
    """A launched device under test, its hand-driven points, and steps whose batches are their numbers."""

    def __init__(self, **options: Any) -> None:
        self.hand, self.trace, self.ends = HandDevice(), Trace(), Trace()
        self.stream = LaunchStream(self.hand.mark, self.ends.put)
        self.device = LaunchedDevice(cast("Any", LaunchedFake(self.trace)), self.stream, **options)
        self.stream.start()
        self.num_reached = 0

    def forward(self, step: Step) -> None:
        end = lambda: self.ends.put(("forward", step.step_id))  # noqa: E731
        self.device.launch_forward(step, cast("StepBatch", step.step_id), end)

    def sample(self, step: Step) -> None:
        self.device.launch_sample(
            step, cast("StepBatch", step.step_id), lambda: self.ends.put(("step", step.step_id))
        )

    def reach(self, *times: int) -> None:
        """The device gets through as many more points, at these times."""
        self.hand.wait_marked(self.num_reached + len(times))
        for at_ns in times:
            self.hand.points[self.num_reached].reach(at_ns)
            self.num_reached += 1


def test_c5_the_clock_of_steps_is_the_devices() -> None:
    """Overlap on: forward 2 is launched behind step 1, so it runs when step 1 ends, and the gap is the device's."""
    bench, first, second = Bench(), make_step(1), make_step(2)
    bench.forward(first)
    bench.sample(first)
    bench.forward(second)
    assert bench.device.oldest_launched is first
    bench.reach(1000, 5000)  # the first forward
    assert bench.ends.wait() == ("forward", 1)
    assert bench.device.running is first
    bench.hand.wait_marked(6)  # forward 2 has reached the device
    bench.reach(5001, 6000)
    assert bench.ends.wait() == ("step", 1)
    assert (first.running_step_id, first.queued_steps, first.gap_ns) == (2, 1, 0)
    assert first.samples is not None
    assert first.samples.token_ids.tolist() == [7]
    assert first.started_ns <= first.forward_ended_ns <= first.sample_started_ns <= first.ended_ns
    bench.reach(6003, 9000)
    assert bench.ends.wait() == ("forward", 2)
    bench.sample(second)
    bench.reach(9500, 9900)
    assert bench.ends.wait() == ("step", 2)
    assert (second.running_step_id, second.queued_steps, second.gap_ns) == (0, 0, 3)
    assert bench.device.running is None
    assert bench.device.oldest_launched is None
    assert bench.stream.close(10)


def test_a_step_that_has_not_reached_the_device_is_not_running() -> None:
    """Queued behind a launching thread that is slow: the device has nothing to do when the step before ends."""
    bench, first, second = Bench(), make_step(1), make_step(2)
    go_on = threading.Event()
    bench.forward(first)
    bench.sample(first)
    bench.stream.submit(lambda: go_on.wait(10))
    bench.forward(second)
    bench.reach(0, 10, 10, 20)
    assert [bench.ends.wait(), bench.ends.wait()] == [("forward", 1), ("step", 1)]
    assert (first.running_step_id, first.queued_steps) == (0, 1)
    go_on.set()
    bench.reach(500, 600)
    assert bench.ends.wait() == ("forward", 2)
    assert second.gap_ns == 480
    assert bench.stream.close(10)


def test_a_reset_forgets_steps_of_the_old_epoch_when_the_device_gets_there() -> None:
    bench, ended, cut, fresh = Bench(), make_step(1), make_step(2), make_step(1, worker_epoch=2)
    bench.forward(ended)
    bench.sample(ended)
    bench.forward(cut)  # never sampled
    bench.device.reset(2)
    bench.forward(fresh)
    bench.reach(0, 10, 10, 20, 20, 30)
    assert [bench.ends.wait() for _ in range(3)] == [("forward", 1), ("step", 1), ("forward", 2)]
    bench.reach(31, 40, 50)
    assert bench.ends.wait() == ("forward", 1)
    assert bench.device.oldest_launched is fresh
    assert (fresh.gap_ns, bench.device.running) == (0, fresh)
    assert bench.stream.close(10)


def test_a_held_end_is_not_marked_before_it_may_be() -> None:
    """--hold-events: the next forward is queued, and the end comes when the step is released."""
    bench, first, second = Bench(hold_events=True), make_step(1), make_step(2)
    bench.forward(first)
    bench.sample(first)
    bench.forward(second)
    bench.reach(0, 10, 10)
    assert bench.ends.wait() == ("forward", 1)
    assert len(bench.hand.points) == 3
    first.release.set()
    bench.reach(20, 20, 30)
    assert [bench.ends.wait(), bench.ends.wait()] == [("step", 1), ("forward", 2)]
    assert bench.stream.close(10)
