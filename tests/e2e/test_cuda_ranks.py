"""A worker of two processes on devices, their kernels on this CPU: one is lost, both end, blocked or not.

What they compute: `tests/worker_model/test_cuda_ranks.py`.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.processes import children, is_running, run
from tests.e2e.stack import Answer, eventually, fold, read_events, request, serve_scheduler
from tests.e2e.test_tensor_parallel import rank_arguments
from tests.kernels.cuda.conftest import compilers  # noqa: F401 - skips where kernels cannot be compiled

pytestmark = pytest.mark.e2e


async def lose_a_rank(model: Path, log: Path, number: signal.Signals) -> str:
    """Sends a signal to rank 1 while a request streams; the log of rank 0, which has ended."""
    arguments = rank_arguments(model, "--device", "cuda", "--max-step", "1")
    async with (
        run("tests.e2e.shim_worker", *arguments, log=log) as ranks,
        serve_scheduler(ranks.address, lane_wait_s=0.2) as stack,
    ):
        await eventually(lambda: bool(stack.server.engine.links))
        assert [worker.device for worker in (await stack.status()).workers] == ["cpu x2"]
        call, answer = stack.open(request([1, 2, 3], 200, ignore_eos=True)), Answer()
        await read_events(call, "delta", answer, count=2)
        (follower,) = children(ranks.popen.pid)
        os.kill(follower, number)
        assert await ranks.wait() == 70
        await fold(call, answer)
        assert answer.error_info.reason == "WORKER_LOST"
        assert not is_running(follower)
        return ranks.log


async def test_a_lost_rank_ends_the_worker(
    byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """O1, O4, O5: killed, it is missed at once; stopped, the device waits for it, and the step takes too long."""
    killed, stopped = await asyncio.gather(
        *(lose_a_rank(byte_model, tmp_path / number.name, number) for number in (signal.SIGKILL, signal.SIGSTOP))
    )
    assert "RankLost" in killed
    assert "StepTimeout" in stopped
    ends = re.findall(r"epoch closed .*worker failed at step", capsys.readouterr().out)
    assert len(ends) == 2, "both said StepFailed, EPOCH"
