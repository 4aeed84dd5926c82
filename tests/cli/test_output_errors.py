"""Where standard output cannot be written: one line and exit code 1, and nothing at all for a closed pipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.fake_server import WAIT_S, FakeServer, delta, response, started

COMMAND = (sys.executable, "-c", "from stepahead.cli.entry import main; main()")
FULL = Path("/dev/full")
CASES = (
    ("--help",),
    ("generate", "hi"),
    ("generate", "--input"),
    ("status",),
    ("scheduler", "--help"),
    ("worker", "--help"),
    ("bench", "scheduler", "--help"),
    pytest.param(("up", "--model", "toy:score-table"), marks=pytest.mark.e2e),
)


MODULES = ("stepahead.scheduler", "stepahead.scheduler.bench", "stepahead.worker")


def arguments_of(case: tuple[str, ...], fake: FakeServer, folder: Path) -> list[str]:
    if case == ("generate", "--input"):
        path = folder / "requests.jsonl"
        path.write_text("\n".join(json.dumps({"prompt": "hi"}) for _ in range(3)))
        return [*case, str(path), "--address", fake.address]
    if case[0] == "up":
        return [*case, "--listen", "127.0.0.1:0", "--log-dir", str(folder)]
    return [*case] if "--help" in case else [*case, "--address", fake.address]


def run(arguments: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=90, check=False
    )


@pytest.mark.skipif(not FULL.exists(), reason="the system has no file that is always full")
@pytest.mark.parametrize("case", CASES)
def test_a_full_disk_is_one_clear_line(fake: FakeServer, tmp_path: Path, case):
    with FULL.open("wb") as full:
        done = run(arguments_of(case, fake, tmp_path), full.fileno())
    lines = [line for line in done.stderr.splitlines() if not line.startswith("stopping")]
    assert (done.returncode, lines) == (1, ["error: cannot write the output: No space left on device"])


@pytest.mark.skipif(not FULL.exists(), reason="the system has no file that is always full")
@pytest.mark.parametrize("module", MODULES)
def test_a_full_disk_is_one_clear_line_without_the_command_too(module: str):
    with FULL.open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    expected = "error: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, expected)


@pytest.mark.skipif(not FULL.exists(), reason="the system has no file that is always full")
def test_a_scheduler_that_cannot_write_its_log_does_not_blame_its_address():
    """Whoever started it is told through the pipe."""
    reading, writing = os.pipe()
    arguments = ("--listen", "127.0.0.1:0", "--worker", "127.0.0.1:1", "--announce-fd", str(writing))
    with FULL.open("wb") as full, open(reading, encoding="utf-8") as told:
        argv = [sys.executable, "-m", "stepahead.scheduler", *arguments]
        try:
            done = subprocess.run(argv, stderr=full, pass_fds=(writing,), timeout=90, check=False)
        finally:
            os.close(writing)
        events = [json.loads(line) for line in told]
    expected = {"event": "failed", "message": "[Errno 28] No space left on device"}
    assert (done.returncode, events[-1]) == (1, expected)


@pytest.mark.parametrize("case", CASES)
def test_a_closed_pipe_ends_quietly(fake: FakeServer, tmp_path: Path, case):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(arguments_of(case, fake, tmp_path), writing)
    finally:
        os.close(writing)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("stopping")]
    assert (done.returncode, lines) == (1, [])


def test_f6_a_reader_that_leaves_ends_the_request_on_the_server(fake: FakeServer):
    """As `stepahead generate ... | head -1` does."""

    def script(request, context):
        yield response(started(request.request_id))
        for index in range(10**6):
            if not context.is_active():
                return
            yield response(delta(index, [1], "a line\n"))

    fake.generate = script
    arguments = [*COMMAND, "generate", "hi", "--request-id", "mine", "--address", fake.address]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"a line\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(WAIT_S) == 1
    assert fake.cancelled_ids == ["mine"]
