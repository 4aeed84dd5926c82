"""Supervision of local services: start order, drain order, deaths, signals."""

import asyncio
import contextlib
import io
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from stepahead.cli import stack as stack_module
from stepahead.cli.announcements import Progress
from stepahead.cli.failures import StackError, StackInterrupted
from stepahead.cli.restarts import RestartPolicy, Restarts
from stepahead.cli.stack import (
    ServiceCommands,
    Stack,
    StackReady,
    run_stack,
)
from stepahead.cli.stack_options import StackOptions, scheduler_arguments, worker_arguments
from stepahead.cli.stack_view import ConsoleView, banner, show_stack_error

FAKE_SERVICE = Path(__file__).with_name("fake_service.py")


class RecordingView:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def worker_progress(self, name: str, progress: Progress) -> None:
        self.seen.append(f"{name} {progress.what} {progress.done_bytes}/{progress.total_bytes}")

    def worker_ready(self, name: str) -> None:
        self.seen.append(f"{name} ready")

    def worker_restarts(self, name: str, error: StackError, restarts: Restarts, delay_s: float) -> None:
        self.seen.append(f"again: {error.message} {restarts.num_in_row} {delay_s:g}")

    def worker_back(self, name: str) -> None:
        self.seen.append(f"back: {name}")

    def worker_lost(self, error: StackError) -> None:
        self.seen.append(f"lost: {error.message}")

    def failed(self, error: StackError) -> None:
        self.seen.append(f"failed: {error.message}")

    def stopping(self) -> None:
        self.seen.append("stopping")


class Services:
    """A stack of fake services and their journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.journal.touch()
        self.view = RecordingView()

    def stack(
        self, *, worker: str = "ok", scheduler: str = "ok", restart: RestartPolicy | None = None, **options
    ) -> Stack:
        commands = ServiceCommands(
            worker=(sys.executable, str(FAKE_SERVICE), "worker", worker, str(self.journal)),
            scheduler=(sys.executable, str(FAKE_SERVICE), "scheduler", scheduler, str(self.journal)),
        )
        return Stack(
            StackOptions(model="m", **options),
            self.view,
            log_dir=self.folder,
            commands=commands,
            restart=restart,
        )

    def lines(self) -> list[str]:
        return self.journal.read_text().splitlines()

    def ends(self) -> list[str]:
        return [line for line in self.lines() if "started" not in line]

    def worker_pids(self) -> list[int]:
        """A fake service says its process id for a port."""
        ready = re.findall(r"^worker started (\d+) ", self.journal.read_text(), re.MULTILINE)
        return [int(pid) for pid in ready]

    def restarts_told(self) -> list[str]:
        return [line for line in self.view.seen if line.startswith(("again: ", "back: "))]

    async def until_seen(self, line: str) -> None:
        while line not in self.view.seen:  # noqa: ASYNC110 - a list
            await asyncio.sleep(0.01)

    async def until(self, line: str) -> None:
        while line not in self.lines():  # noqa: ASYNC110 - another process writes the line
            await asyncio.sleep(0.01)


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return Services(tmp_path)


async def wait_for_ever(ready: StackReady) -> None:
    await asyncio.Event().wait()


async def test_workers_start_first_and_stop_last(services: Services):
    async def body(ready: StackReady) -> str:
        assert ready.address.startswith("127.0.0.1:")
        assert [worker.text("model") for worker in ready.workers] == ["fake", "fake"]
        return "done"

    assert await run_stack(services.stack(workers=2), body) == "done"
    starts = [line.split()[0] for line in services.lines() if "started" in line]
    assert starts == ["worker", "worker", "scheduler"]
    assert services.ends() == ["scheduler SIGTERM", "worker SIGTERM", "worker SIGTERM"]
    assert {"worker 1 weights 1/2", "worker 2 ready"} <= set(services.view.seen)
    scheduler_line = services.lines()[2]
    assert scheduler_line.count("--worker 127.0.0.1:") == 2


async def test_child_that_fails_to_load_is_reported_with_its_log(services: Services):
    with pytest.raises(StackError) as caught:
        await run_stack(services.stack(worker="fail"), wait_for_ever)
    assert caught.value.message == "worker exited with code 3: no such model"
    assert caught.value.log_lines == ("first line of the log", "last line of the log")
    assert str(services.folder / "worker.log") in caught.value.advice
    assert not any(line.startswith("scheduler") for line in services.lines())


async def test_scheduler_that_fails_takes_the_workers_down_in_order(services: Services):
    with pytest.raises(StackError, match="scheduler exited with code 3: no such model"):
        await run_stack(services.stack(scheduler="fail"), wait_for_ever)
    assert services.ends() == ["worker SIGTERM"]


async def test_worker_that_is_refused_ends_the_start_with_the_reason(services: Services):
    with pytest.raises(StackError, match=r"refused the worker at 127\.0\.0\.1:1: max_model_len is odd") as caught:
        await run_stack(services.stack(scheduler="refuse"), wait_for_ever)
    assert str(services.folder / "scheduler.log") in caught.value.advice
    assert services.ends() == ["scheduler SIGTERM", "worker SIGTERM"]


async def test_child_that_dies_later_cancels_the_body_and_stops_the_rest(services: Services):
    async def body(ready: StackReady) -> None:
        with services.journal.open("a") as file:
            file.write("DIE\n")
        await asyncio.Event().wait()

    with pytest.raises(StackError) as caught:
        await run_stack(services.stack(worker="die"), body)
    assert caught.value.message == "worker was ended by SIGKILL"
    assert "memory" in caught.value.advice
    assert services.ends()[-1] == "scheduler SIGTERM"


async def test_the_others_go_on_when_a_worker_dies_and_the_last_one_ends_it(services: Services):
    pids: list[int] = []

    async def body(ready: StackReady) -> None:
        # A fake service says its process id for a port.
        pids.extend(int(pid) for pid in re.findall(r"--worker 127.0.0.1:(\d+)", services.journal.read_text()))
        os.kill(pids[0], signal.SIGKILL)
        while not any(line.startswith("lost: worker") for line in services.view.seen):  # noqa: ASYNC110 - a list
            await asyncio.sleep(0.01)
        assert services.ends() == []
        os.kill(pids[1], signal.SIGKILL)
        await asyncio.Event().wait()

    with pytest.raises(StackError, match=r"worker \d was ended by SIGKILL"):
        await run_stack(services.stack(workers=2), body)
    assert len(pids) == 2
    assert services.ends() == ["scheduler SIGTERM"]


async def test_a_worker_that_dies_is_started_again_where_it_was(services: Services):
    policy = RestartPolicy(most=2, first_delay_s=0.01)
    killed = "worker was ended by SIGKILL"

    async def body(ready: StackReady) -> None:
        for num_in_row in (1, 2, 3):
            os.kill(services.worker_pids()[-1], signal.SIGKILL)
            if num_in_row < 3:
                await services.until_seen(f"again: {killed} {num_in_row} {0.01 * num_in_row:g}")
                while services.view.seen.count("back: worker") < num_in_row:  # noqa: ASYNC110 - a list
                    await asyncio.sleep(0.01)
            assert services.ends() == [], "the scheduler serves on"
        await asyncio.Event().wait()

    with pytest.raises(StackError, match=f"{killed}; it was started again 2 times and never served for 60 s"):
        await run_stack(services.stack(restart=policy), body)
    pids, starts = services.worker_pids(), [line for line in services.lines() if line.startswith("worker started")]
    assert len(set(pids)) == len(starts) == 3
    assert "--listen 127.0.0.1:0 " in starts[0]
    assert all(f"--listen 127.0.0.1:{pids[0]} " in start for start in starts[1:])
    assert services.ends() == ["scheduler SIGTERM"]


async def test_a_worker_that_cannot_load_again_ends_it_with_its_log(services: Services):
    async def body(ready: StackReady) -> None:
        with services.journal.open("a") as file:
            file.write("FAIL\n")
        os.kill(services.worker_pids()[0], signal.SIGKILL)
        await asyncio.Event().wait()

    policy = RestartPolicy(most=2, first_delay_s=0.01)
    with pytest.raises(StackError, match="code 3: no such model; it was started again 2 times") as caught:
        await run_stack(services.stack(worker="fade", restart=policy), body)
    assert caught.value.log_lines[-1] == "last line of the log"
    assert [line for line in services.view.seen if line.startswith("again")] == [
        "again: worker was ended by SIGKILL 1 0.01",
        "again: worker exited with code 3: no such model 2 0.02",
    ]


async def test_a_stop_while_a_worker_is_away_is_in_order(services: Services):
    async def body(ready: StackReady) -> str:
        os.kill(services.worker_pids()[0], signal.SIGKILL)
        await services.until_seen("again: worker was ended by SIGKILL 1 30")
        return "done"

    restart = RestartPolicy(first_delay_s=30, most_delay_s=30)
    assert await run_stack(services.stack(restart=restart), body) == "done"
    assert services.ends() == ["scheduler SIGTERM"]
    assert [line for line in services.view.seen if "worker was" in line] == [
        "again: worker was ended by SIGKILL 1 30"
    ]


async def test_a_worker_that_dies_in_a_drain_is_started_again(services: Services):
    """Accepted requests may finish, so whoever computes them must be there."""

    async def body(ready: StackReady) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    async def kill_then_end() -> None:
        await services.until("scheduler SIGTERM")
        os.kill(services.worker_pids()[0], signal.SIGKILL)
        while len(services.worker_pids()) < 2:  # noqa: ASYNC110 - another process writes the line
            await asyncio.sleep(0.01)
        scheduler = re.findall(r"^scheduler started (\d+) ", services.journal.read_text(), re.MULTILINE)
        os.kill(int(scheduler[0]), signal.SIGTERM)  # its requests have finished

    killer = asyncio.create_task(kill_then_end())
    restart = RestartPolicy(first_delay_s=0.01)
    with pytest.raises(StackInterrupted) as caught:
        await run_stack(services.stack(scheduler="drains", restart=restart), body)
    await killer
    assert (caught.value.killed, caught.value.served) == (False, True)
    assert len(services.worker_pids()) == 2
    assert services.ends()[-1] == "worker SIGTERM"
    assert services.restarts_told() == []


async def test_a_drain_goes_on_counting_how_often_a_worker_was_started(services: Services):
    killed = "worker was ended by SIGKILL"

    async def body(ready: StackReady) -> None:
        with services.journal.open("a") as file:
            file.write("FAIL\n")
        os.kill(services.worker_pids()[0], signal.SIGKILL)
        await services.until_seen("again: worker exited with code 3: no such model 2 0.02")
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    restart = RestartPolicy(most=3, first_delay_s=0.01)
    stack = services.stack(worker="fade", scheduler="drains", restart=restart, drain_timeout=3600.0)
    with pytest.raises(StackError, match="no such model; it was started again 3 times"):
        await run_stack(stack, body)
    assert services.restarts_told()[0] == f"again: {killed} 1 0.01"
    assert len([line for line in services.lines() if line.startswith("worker started")]) == 4


async def test_who_stops_in_haste_starts_no_worker_again(services: Services):
    async def body(ready: StackReady) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    async def again() -> None:
        await services.until("scheduler SIGTERM")
        os.kill(os.getpid(), signal.SIGTERM)

    interrupter = asyncio.create_task(again())
    with pytest.raises(StackInterrupted) as caught:
        await run_stack(services.stack(scheduler="drains", restart=RestartPolicy(first_delay_s=0.0)), body)
    await interrupter
    assert (caught.value.killed, caught.value.exit_code) == (True, 143)
    assert services.restarts_told() == []
    assert len(services.worker_pids()) == 1


async def test_a_drain_that_lost_its_last_worker_ends_and_says_why(services: Services):
    async def body(ready: StackReady) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    async def lose() -> None:
        await services.until("scheduler SIGTERM")
        with services.journal.open("a") as file:
            file.write("FAIL\n")
        os.kill(services.worker_pids()[0], signal.SIGKILL)

    loser = asyncio.create_task(lose())
    restart = RestartPolicy(most=1, first_delay_s=0.01)
    stack = services.stack(worker="fade", scheduler="drains", restart=restart, drain_timeout=3600.0)
    with pytest.raises(StackError, match="no such model; it was started again 1 times"):
        await run_stack(stack, body)
    await loser
    assert services.view.seen[-1].startswith("failed: worker exited with code 3")
    assert [line for line in services.ends() if line.startswith("scheduler")] == ["scheduler SIGTERM"] * 2


def test_restarts_back_off_and_count_anew_after_a_steady_time():
    restarts = Restarts(RestartPolicy(most=5, steady_s=60, first_delay_s=1, most_delay_s=4))
    assert [restarts.delay_after(served_s=59) for _ in range(6)] == [1, 2, 4, 4, 4, None]
    assert [restarts.delay_after(served_s) for served_s in (60, 0)] == [1, 2]


async def test_services_end_with_a_parent_that_is_killed(services: Services):
    """Nobody is left to stop them in order; at least they stop."""
    script = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from tests.cli.test_stack import Services, run_stack\n"
        "async def body(ready): os.kill(os.getpid(), 9)\n"
        "asyncio.run(run_stack(Services(Path(sys.argv[1])).stack(), body))\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(services.folder))
    assert await parent.wait() == -signal.SIGKILL
    async with asyncio.timeout(30):
        await services.until("worker SIGTERM")
        await services.until("scheduler SIGTERM")


async def test_death_of_a_child_explains_the_failure_it_caused(services: Services):
    async def body(ready: StackReady) -> None:
        with services.journal.open("a") as file:
            file.write("DIE\n")
        raise ConnectionError("the connection broke")

    with pytest.raises(StackError, match="worker was ended by SIGKILL"):
        await run_stack(services.stack(worker="die"), body)


async def test_failure_of_the_body_stops_the_stack_and_is_kept(services: Services):
    async def body(ready: StackReady) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        await run_stack(services.stack(scheduler="sour"), body)
    assert caught.value.__notes__ == ["scheduler exited with code 5 while stopping"]
    assert services.ends() == ["scheduler SIGTERM", "worker SIGTERM"]


async def test_bad_exit_while_stopping_is_an_error(services: Services):
    async def body(ready: StackReady) -> None:
        return None

    with pytest.raises(StackError, match="scheduler exited with code 5 while stopping"):
        await run_stack(services.stack(scheduler="sour"), body)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_first_signal_drains_in_order(services: Services, signal_number: int):
    async def body(ready: StackReady) -> None:
        os.kill(os.getpid(), signal_number)
        await asyncio.Event().wait()

    with pytest.raises(StackInterrupted) as caught:
        await run_stack(services.stack(), body)
    assert not caught.value.killed
    assert (caught.value.served, caught.value.exit_code) == (True, 128 + signal_number)
    assert services.ends() == ["scheduler SIGTERM", "worker SIGTERM"]
    assert services.view.seen[-1] == "stopping"


async def test_under_nohup_a_closed_terminal_does_not_stop_it(services: Services):
    async def body(ready: StackReady) -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        return "went on"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert await run_stack(services.stack(), body) == "went on"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_second_signal_kills_a_child_that_hangs(services: Services, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_module, "_HASTE_S", 0.2)

    async def interrupt_twice() -> None:
        while not services.lines():  # noqa: ASYNC110 - another process writes the line
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        await services.until("worker SIGTERM")
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = asyncio.create_task(interrupt_twice())
    with pytest.raises(StackInterrupted) as caught:
        await run_stack(services.stack(worker="deaf"), wait_for_ever)
    await interrupter
    assert caught.value.killed
    assert not caught.value.served
    assert set(services.ends()) == {"worker SIGTERM"}


async def test_second_signal_cuts_a_drain_short_and_the_third_kills(services: Services):
    async def body(ready: StackReady) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    async def go_on() -> None:
        await services.until("scheduler SIGTERM")
        os.kill(os.getpid(), signal.SIGTERM)
        while services.ends().count("scheduler SIGTERM") < 2:  # noqa: ASYNC110 - another process writes the line
            await asyncio.sleep(0.01)  # told again, it may tell its requests
        os.kill(os.getpid(), signal.SIGTERM)

    interrupter = asyncio.create_task(go_on())
    with pytest.raises(StackInterrupted) as caught:
        await run_stack(services.stack(scheduler="slow"), body)
    await interrupter
    assert (caught.value.killed, caught.value.served, caught.value.exit_code) == (True, True, 130)


async def test_who_cannot_finish_is_not_waited_for(services: Services):
    """The reason comes first, then the end: a scheduler that drains is told a second time."""

    async def body(ready: StackReady) -> None:
        os.kill(services.worker_pids()[0], signal.SIGKILL)
        await asyncio.Event().wait()

    with pytest.raises(StackError, match="worker was ended by SIGKILL"):
        await run_stack(services.stack(scheduler="drains", drain_timeout=3600.0), body)
    assert services.view.seen[-1] == "failed: worker was ended by SIGKILL"
    assert services.ends() == ["scheduler SIGTERM", "scheduler SIGTERM"]


@pytest.mark.parametrize("in_order", [True, False])
async def test_signals_do_not_reach_a_process_that_has_stopped_its_stack(services: Services, in_order: bool):
    """Its exit code is settled, and no raw signal may replace it."""

    async def body(ready: StackReady) -> None:
        if not in_order:
            raise StackError("it failed")

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with contextlib.nullcontext() if in_order else pytest.raises(StackError):
            await run_stack(services.stack(), body, ends_process=True)
        for number in handlers:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


async def test_malformed_announcement_is_an_error(tmp_path: Path):
    commands = ServiceCommands(
        worker=(sys.executable, "-c", "import os,sys; os.write(int(sys.argv[-1]), b'hello\\n')")
    )
    stack = Stack(StackOptions(model="m"), RecordingView(), log_dir=tmp_path, commands=commands)
    with pytest.raises(StackError, match="worker announced something malformed"):
        await run_stack(stack, wait_for_ever)


def test_arguments_leave_unset_values_to_the_services():
    assert worker_arguments(StackOptions(model="m"), cores=8) == ["--model", "m", "--listen", "127.0.0.1:0"]
    assert scheduler_arguments(StackOptions(model="m"), ["a:1"]) == [
        "--listen", "127.0.0.1:0", "--drain-timeout", "30", "--worker", "a:1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "threads", "num_cores", "expected"),
    [(1, None, 8, None), (2, None, 8, "4"), (3, None, 2, "1"), (2, 3, 8, "3"), (1, 5, 8, "5")],
)
def test_workers_share_the_cores(workers, threads, num_cores, expected):
    arguments = worker_arguments(StackOptions(model="m", workers=workers, threads=threads), num_cores)
    given = arguments[arguments.index("--threads") + 1] if "--threads" in arguments else None
    assert given == expected


def test_ranks_share_the_cores_of_their_worker():
    options = StackOptions(model="m", workers=2, tensor_parallel_size=2)
    assert worker_arguments(options, 8)[-4:] == ["--tensor-parallel-size", "2", "--threads", "2"]
    assert "--threads" not in worker_arguments(StackOptions(model="m", tensor_parallel_size=2), 8)


@pytest.mark.parametrize(("overlap", "deeper"), [("off", False), ("2", False), ("3", True)])
def test_deep_overlap_reaches_the_worker(overlap, deeper):
    options = StackOptions(model="m", overlap=overlap)
    assert ("--max-overlap-depth" in worker_arguments(options, 2)) is deeper
    assert scheduler_arguments(options, [])[2:4] == ["--overlap", overlap]


async def test_banner_names_everything_a_user_needs(services: Services):
    console = Console(width=100, record=True, file=io.StringIO())

    async def body(ready: StackReady) -> None:
        console.print(banner(ready, StackOptions(model="m", overlap="off"), services.folder))

    await run_stack(services.stack(workers=2), body)
    text = console.export_text()
    for part in (
        "127.0.0.1:", "fake", "cpu, float32, 2 worker(s)", "8 KiB; each worker 10 blocks of 16 tokens",
        "up to 4 sequences",
        "2.50 of the full 64 tokens", "off", "stepahead generate --address", "Ctrl-C",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("flags", "chats", "generates"),
    [
        ((), False, '"Once upon a time"'),
        (("--chatty",), True, '"Once upon a time"'),
        (("--dumb",), False, "--token-ids 1,2,3"),
    ],
)
async def test_banner_suggests_what_the_model_can_answer(services: Services, flags, chats, generates):
    console = Console(width=100, record=True, file=io.StringIO())

    async def body(ready: StackReady) -> None:
        console.print(banner(ready, StackOptions(model="m"), services.folder))

    await run_stack(services.stack(scheduler_flags=flags), body)
    text = console.export_text()
    assert ("stepahead chat --address" in text, "stepahead generate --address" in text) == (chats, True)
    assert generates in text


async def test_banner_counts_no_more_sequences_than_may_run(services: Services):
    console = Console(width=100, record=True, file=io.StringIO())

    async def body(ready: StackReady) -> None:
        console.print(banner(ready, StackOptions(model="m"), services.folder))

    await run_stack(services.stack(workers=2, worker_flags=("--roomy",)), body)
    assert "up to 4 sequences, 4.00 of the full 64 tokens" in console.export_text()


def test_console_view_shows_a_bar_per_worker_and_ends_cleanly():
    console = Console(force_terminal=True, width=80, record=True, file=io.StringIO())
    with ConsoleView(console) as view:
        view.worker_progress("worker 1", Progress("weights", 1, 2))
        view.worker_progress("worker 1", Progress("weights", 2, 2))
        view.worker_ready("worker 1")
        view.worker_ready("worker 2")
        view.stopping()
    assert "stopping" in console.export_text()


def test_a_restart_tells_its_reason_once():
    console = Console(width=100, record=True, file=io.StringIO())
    view, restarts = ConsoleView(console), Restarts(RestartPolicy())
    killed, full = StackError("worker 1 was ended by SIGKILL"), StackError("worker 1 exited with code 1: no memory")
    for error in (killed, killed, full):
        delay_s = restarts.delay_after(0.0)
        assert delay_s is not None
        view.worker_restarts("worker 1", error, restarts, delay_s)
    view.worker_restarts("worker 2", killed, restarts, 1.0)
    assert console.export_text().splitlines() == [
        "worker 1 was ended by SIGKILL; starting it again in 0.5 s (1 of 5)",
        "worker 1 ended again; starting it again in 1 s (2 of 5)",
        "worker 1 exited with code 1: no memory; starting it again in 2 s (3 of 5)",
        "worker 1 was ended by SIGKILL; starting it again in 1 s (3 of 5)",
    ]


def test_stack_error_shows_log_message_and_advice():
    console = Console(width=100, record=True, file=io.StringIO())
    error = StackError("worker exited with code 3", log_lines=["[red] is no markup"], advice="do this")
    error.add_note("and that")
    show_stack_error(console, error)
    lines = console.export_text().splitlines()
    assert lines == [
        "  | [red] is no markup", "error: worker exited with code 3", "do this", "also: and that",
    ]  # fmt: skip
    error = StackError("worker exited with code 3", log_lines=["a line"], advice="do this")
    quiet = ConsoleView(Console(width=100, record=True, file=io.StringIO(), quiet=True))
    quiet.failed(error)
    ConsoleView(console).failed(error)
    error.add_note("and that")
    show_stack_error(console, error)
    assert console.export_text().splitlines() == [
        "  | a line", "error: worker exited with code 3", "do this", "also: and that",
    ]  # fmt: skip
