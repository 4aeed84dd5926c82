"""What a worker was sent for steps that have not completed, in case its stream breaks."""

from __future__ import annotations

from stepahead.v1 import worker_pb2


class SentSteps:
    """Plans and gates by step."""

    def __init__(self) -> None:
        self._plans: dict[int, worker_pb2.RunStepsRequest] = {}
        self._gates: dict[int, worker_pb2.RunStepsRequest] = {}

    def add_plan(self, message: worker_pb2.RunStepsRequest) -> None:
        """Keeps a plan until its step completes."""
        self._plans[message.plan.step_id] = message

    def add_gate(self, message: worker_pb2.RunStepsRequest) -> bool:
        """Keeps a gate until its step completes. False if it has: the gate is late and of no use."""
        if message.gate.step_id not in self._plans:
            return False
        self._gates[message.gate.step_id] = message
        return True

    def complete(self, step_id: int) -> worker_pb2.StepPlan | None:
        """The step has completed; returns its plan."""
        self._gates.pop(step_id, None)
        message = self._plans.pop(step_id, None)
        return message.plan if message is not None else None

    def clear(self) -> None:
        """The session is over."""
        self._plans.clear()
        self._gates.clear()

    def again(self, last_accepted_step_id: int) -> list[worker_pb2.RunStepsRequest]:
        """What a resumed session gets first: plans it has not accepted, then every gate."""
        plans = [self._plans[step_id] for step_id in sorted(self._plans) if step_id > last_accepted_step_id]
        return plans + [self._gates[step_id] for step_id in sorted(self._gates)]
