"""What is timed: our core, our core with its wire messages, and another scheduler in a process of its own.

One step of a subject is a commit of the oldest step in flight, its tokens appended to one list per request, and the
plan of the next step. The results themselves are made outside the timed part: they are the worker's business.
"""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import tempfile
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from stepahead.scheduler.bench import workloads
from stepahead.scheduler.bench.plan_mirror import PlanMirror, StepRows, boundary_of, result_of
from stepahead.scheduler.bench.workloads import BLOCK_SIZE, SAMPLED_TOKEN_ID, Workload
from stepahead.scheduler.convert import plan_to_proto, result_from_proto
from stepahead.scheduler.core import (
    CommitOutcome,
    LaneConfig,
    LaneId,
    Request,
    RequestKey,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
)
from stepahead.v1 import worker_pb2

OVERLAP_DEPTH = 1
_LANE = LaneId(0)
_EPOCH = 1


@dataclass(slots=True)
class Samples:
    """Timed steps, in nanoseconds."""

    wall_ns: array[int] = field(default_factory=lambda: array("q"))
    cpu_ns: array[int] = field(default_factory=lambda: array("q"))
    """Process time: what a busy machine does not add to."""
    submit_ns: array[int] = field(default_factory=lambda: array("q"))
    """Wall time of accepting one request each, between the steps."""
    num_tokens: int = 0
    """Tokens that the timed steps committed."""

    def extend(self, other: Samples) -> None:
        """Adds the steps of another round."""
        self.wall_ns.extend(other.wall_ns)
        self.cpu_ns.extend(other.cpu_ns)
        self.submit_ns.extend(other.submit_ns)
        self.num_tokens += other.num_tokens


class Subject(Protocol):
    """A scheduler under a load that goes on."""

    @property
    def name(self) -> str:
        """As it stands in the report."""
        ...

    def run(self, num_steps: int) -> Samples:
        """Times the next `num_steps` steps."""
        ...


class SubjectFailed(Exception):
    """A scheduler in a process of its own cannot be measured; the message says why."""


class CoreSubject:
    """Our core under a load. With `on_wire` the timed part encodes each plan and decodes each boundary."""

    def __init__(self, workload: Workload, *, on_wire: bool, prefix_caching: bool = True) -> None:
        self.name = "core + wire" if on_wire else "core"
        self._workload = workload
        self._on_wire = on_wire
        self._scheduler = Scheduler(SchedulerConfig(overlap_depth=OVERLAP_DEPTH, prefix_caching=prefix_caching))
        self._scheduler.open_lane(_LANE, _lane_config(workload), _EPOCH)
        self._mirror = PlanMirror()
        self._in_flight: deque[StepRows] = deque()
        self._outputs: dict[RequestKey, list[int]] = {}
        self._known_keys: list[RequestKey] = []
        self._known_outputs: list[list[int]] = []
        self._num_submitted = 0
        self._samples = Samples()
        self._fill()
        self.run(workload.num_warm_up_steps)
        _freeze_heap()

    def run(self, num_steps: int) -> Samples:
        """Times the next `num_steps` steps."""
        self._samples = samples = Samples()
        step = self._wire_step if self._on_wire else self._core_step
        for _ in range(num_steps):
            self._fill_window()
            outcome, plan = step(self._in_flight.popleft())
            samples.num_tokens += len(outcome.token_ids)
            for finished in outcome.finished:
                del self._outputs[finished.key]
            self._book(plan)
            self._fill()
        return samples

    def _core_step(self, rows: StepRows) -> tuple[CommitOutcome, StepPlan | None]:
        result = result_of(rows, epoch=_EPOCH, token_id=SAMPLED_TOKEN_ID)
        wall_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        outcome = self._commit(result)
        plan = self._scheduler.plan(_LANE).plan
        self._record(wall_ns, cpu_ns)
        return outcome, plan

    def _wire_step(self, rows: StepRows) -> tuple[CommitOutcome, StepPlan | None]:
        message = boundary_of(rows, epoch=_EPOCH, token_id=SAMPLED_TOKEN_ID)
        wall_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        outcome = self._commit(result_from_proto(worker_pb2.RunStepsResponse.FromString(message).boundary))
        plan = self._scheduler.plan(_LANE).plan
        if plan is not None:
            worker_pb2.RunStepsRequest(plan=plan_to_proto(plan)).SerializeToString()
        self._record(wall_ns, cpu_ns)
        return outcome, plan

    def _commit(self, result: StepResult) -> CommitOutcome:
        outcome = self._scheduler.commit(_LANE, result)
        # As the engine does it: the core hands out the same list of keys while its rows stay the same.
        if outcome.keys is not self._known_keys:
            self._known_keys = outcome.keys
            self._known_outputs = [self._outputs[key] for key in outcome.keys]
        for output, token_id in zip(self._known_outputs, outcome.token_ids, strict=True):
            output.append(token_id)
        return outcome

    def _record(self, wall_ns: int, cpu_ns: int) -> None:
        end_cpu_ns, end_wall_ns = time.process_time_ns(), time.perf_counter_ns()
        self._samples.cpu_ns.append(end_cpu_ns - cpu_ns)
        self._samples.wall_ns.append(end_wall_ns - wall_ns)

    def _book(self, plan: StepPlan | None) -> bool:
        if plan is None:
            return False
        self._in_flight.append(self._mirror.rows_of(plan))
        return True

    def _fill_window(self) -> None:
        """Plans up to the overlap depth: at the start, and where the step before found no row that could run."""
        while len(self._in_flight) <= OVERLAP_DEPTH and self._book(self._scheduler.plan(_LANE).plan):
            pass
        if not self._in_flight:
            raise AssertionError("the load does not keep the lane busy")

    def _fill(self) -> None:
        """Keeps the load's backlog waiting."""
        wanted = self._workload.num_rows + self._workload.backlog
        while len(self._outputs) < wanted:
            index = self._num_submitted
            request = Request(
                key=RequestKey(index + 1),
                prompt_token_ids=tuple(self._workload.prompt_of(index)),
                max_tokens=self._workload.max_tokens_of(index),
            )
            begin_ns = time.perf_counter_ns()
            self._scheduler.add_request(request)
            self._samples.submit_ns.append(time.perf_counter_ns() - begin_ns)
            self._outputs[request.key] = []
            self._num_submitted += 1


def _lane_config(workload: Workload) -> LaneConfig:
    return LaneConfig(
        num_slots=workload.num_rows * (OVERLAP_DEPTH + 1),
        max_num_seqs=workload.num_rows,
        max_num_batched_tokens=workload.max_num_batched_tokens,
        max_model_len=workload.max_model_len,
        num_blocks=workload.num_blocks,
        block_size=BLOCK_SIZE,
    )


def _freeze_heap() -> None:
    # As the scheduler service does once it is up; other schedulers under test do it too.
    gc.collect()
    gc.freeze()


class PeerProcess:
    """Another scheduler behind pipes, in its own interpreter. scripts/bench_vllm_scheduler.py is the far end."""

    def __init__(self, interpreter: Path, script: Path) -> None:
        if not script.is_file():
            raise SubjectFailed(f"{script} does not exist: it is part of the source tree; --vllm-script names it")
        # A file, not a pipe: nobody reads it until the end.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - see close
        try:
            self._process = subprocess.Popen(
                [interpreter, script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self._errors.close()
            raise SubjectFailed(f"{interpreter}: {error.strerror}") from error

    def ask(self, command: dict[str, object]) -> dict[str, object]:
        """Sends one command and waits for its answer."""
        process = self._process
        assert process.stdin is not None, "made with pipes"
        assert process.stdout is not None, "made with pipes"
        try:
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            line = ""
        else:
            line = process.stdout.readline()
        if not line:
            raise SubjectFailed(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return f"the peer exited with code {self._process.returncode}: {lines[-1] if lines else 'no message'}"

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        # Not communicate: it would write to a pipe that may be broken.
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class PeerSubject:
    """Another scheduler under a load."""

    def __init__(
        self, peer: PeerProcess, *, scenario: str, num_rows: int, scheduler: str, prefix_caching: bool
    ) -> None:
        self._peer = peer
        answer = peer.ask(
            {
                "open": {
                    "workloads": workloads.__file__,
                    "scenario": scenario,
                    "rows": num_rows,
                    "scheduler": scheduler,
                    "prefix_caching": prefix_caching,
                }
            }
        )
        self.name = str(answer["name"])

    def run(self, num_steps: int) -> Samples:
        """Times the next `num_steps` steps."""
        answer = self._peer.ask({"run": num_steps})
        samples = Samples()
        for name in ("wall_ns", "cpu_ns", "submit_ns"):
            values = answer[name]
            assert isinstance(values, list), "the peer answers with columns"
            getattr(samples, name).extend(values)
        num_tokens = answer["num_tokens"]
        assert isinstance(num_tokens, int), "the peer counts tokens"
        samples.num_tokens = num_tokens
        return samples
