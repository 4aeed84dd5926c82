"""The command line on the real services, with toy models."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stepahead.cli.lab_generate import CASES
from stepahead.cli.main import main
from stepahead.client import Client
from tests.e2e.processes import children, is_running

pytestmark = pytest.mark.e2e

WAIT_S = 90.0
COMMAND = (sys.executable, "-c", "from stepahead.cli.main import main; main()")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False)


def ask(*arguments: str) -> Result:
    """A command that only talks to a server, run in this process: much cheaper than one of its own."""
    result = CliRunner().invoke(main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


class Up:
    """A running `stepahead up`, on a free port."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self.stderr_path = folder / "up.stderr"
        with self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*COMMAND, "up", "--listen", "127.0.0.1:0", "--log-dir", str(folder), *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "COLUMNS": "120"},
            )
        self.banner = ""
        self.address = ""

    def wait_until_serving(self) -> None:
        self.banner = self._read_banner()
        found = re.search(r"address\s+(\S+)", self.banner)
        assert found is not None, self.banner + self.stderr
        self.address = found.group(1)

    def _read_banner(self) -> str:
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("╰"):
                break
        return "".join(lines)

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def children(self) -> dict[str, list[int]]:
        """Process ids by service."""
        found: dict[str, list[int]] = {"worker": [], "scheduler": []}
        for child in children(self.process.pid):
            argv = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
            for service, pids in found.items():
                if f"stepahead.{service}" in argv:
                    pids.append(child)
        return found

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            for pids in self.children().values():
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def up(tmp_path: Path) -> Iterator[type[Up]]:
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        started.append(Up(arguments, tmp_path))
        started[-1].wait_until_serving()
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_up_generate_status_and_clean_stop(up):
    stack = up("--model", "toy:score-table", "--workers", "2")
    for part in ("score-table", "2 worker(s)", "stepahead generate", "Ctrl-C"):
        assert part in stack.banner
    assert "stepahead chat" not in stack.banner, "it has no chat template"
    answer = ask("generate", "--token-ids", "0", "--max-tokens", "8", "--json", "--address", stack.address)
    assert answer.exit_code == 0, answer.stderr
    completion = json.loads(answer.stdout)
    assert completion["token_ids"] == [1, 2, 3, 4]
    assert completion["text"] == "Small steps help"
    assert completion["finish_reason"] == "stop"
    assert completion["matched"] == 4
    assert completion["usage"] == {"prompt_tokens": 1, "cached_prompt_tokens": 0, "output_tokens": 4}
    streamed = ask("generate", "--token-ids", "0", "--max-tokens", "2", "--address", stack.address)
    assert streamed.stdout == "Small steps\n"
    status = json.loads(ask("status", "--json", "--address", stack.address).stdout)
    assert status["state"] == "serving"
    assert [worker["connected"] for worker in status["workers"]] == [True, True]
    assert status["totals"]["requests_finished"] == 2
    assert "serving" in ask("status", "--address", stack.address).stdout
    assert stack.stop() == 0
    assert "error" not in stack.stderr


def test_stop_lets_an_accepted_request_finish(up):
    stack = up("--model", "toy:sleep?ms=10")
    outcome: list[int] = []
    with Client(stack.address) as client, client.stream([1, 2], max_tokens=60, text=False) as stream:
        next(stream)
        stopper = threading.Thread(target=lambda: outcome.append(stack.stop()))
        stopper.start()
        completion = stream.completion()
        stopper.join()
    assert len(completion.token_ids) == 60
    assert outcome == [0]


def test_up_with_two_ranks(byte_model, up, tmp_path):
    """The banner and the status say it, Ctrl-C leaves nothing."""
    stack = up("--model", str(byte_model), "--dtype", "float32", "--tensor-parallel-size", "2")
    assert "cpu x2, float32" in stack.banner
    answer = ask("generate", "ab", "--max-tokens", "4", "--temperature", "0", "--json", "--address", stack.address)
    assert answer.exit_code == 0, answer.stderr
    assert len(json.loads(answer.stdout)["token_ids"]) == 4
    status = json.loads(ask("status", "--json", "--address", stack.address).stdout)
    assert [worker["device"] for worker in status["workers"]] == ["cpu x2"]
    (worker,) = stack.children()["worker"]
    followers = children(worker)
    assert len(followers) == 1
    assert stack.stop() == 0
    assert "error" not in stack.stderr
    assert not any(is_running(pid) for pid in [worker, *followers])
    assert "rank_lost" not in (tmp_path / "worker.log").read_text(), "it was told to end"


def test_bad_input_is_refused_by_name_and_the_server_goes_on(up):
    stack = up("--model", "toy:score-table")
    common = ("--token-ids", "0", "--address", stack.address)
    for arguments, field in (
        (("--max-tokens", "0"), "max_tokens"),
        (("--temperature", "-1"), "temperature"),
        (("--temperature", "nan"), "temperature"),
        (("--top-p", "0"), "top_p"),
        (("--top-p", "1.5"), "top_p"),
    ):
        refused = ask("generate", *common, *arguments)
        assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1), refused.stderr
        assert field in refused.stderr
    out_of_range = ask("generate", "--token-ids", "99", "--address", stack.address)
    assert out_of_range.exit_code == 2
    assert "token_ids" in out_of_range.stderr
    unknown = ask("generate", *common, "--served-model", "other")
    assert (unknown.exit_code, "other" in unknown.stderr) == (1, True), "it is nothing that could be sent right"
    assert ask("generate", *common).stdout == "Small steps help\n"
    assert stack.stop() == 0


def test_a_scheduler_that_is_killed_ends_up_with_its_name(up):
    stack = up("--model", "toy:score-table")
    os.kill(stack.children()["scheduler"][0], signal.SIGKILL)
    assert stack.process.wait(WAIT_S) == 1
    assert "scheduler was ended by SIGKILL" in stack.stderr


def test_a_worker_that_is_killed_comes_back_and_its_requests_go_on(up):
    """P1: a stream goes on without a gap, and a request that came meanwhile waits."""
    stack = up("--model", "toy:sleep?ms=10")
    with Client(stack.address) as client:
        whole = client.generate([1, 2], max_tokens=60, temperature=0, text=False).token_ids
        (worker,) = stack.children()["worker"]
        with client.stream([1, 2], max_tokens=60, temperature=0, text=False) as stream:
            next(stream)
            os.kill(worker, signal.SIGKILL)
            late = client.generate([1, 2], max_tokens=3, temperature=0, text=False)
            assert stream.completion().token_ids == whole
    assert late.token_ids == whole[:3]
    (again,) = stack.children()["worker"]
    assert again != worker
    lines = ["worker was ended by SIGKILL; starting it again in 0.5 s (1 of 5)"]
    assert stack.stderr.splitlines() == [*lines, "worker serves again"]
    assert stack.stop() == 0


def test_unknown_model_says_why(tmp_path):
    result = run("up", "--model", "toy:nothing", "--listen", "127.0.0.1:0", "--log-dir", str(tmp_path))
    assert result.returncode == 2
    assert "--model toy:nothing: 'nothing' does not exist" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-kv-blocks", "9", "--kv-cache-bytes", "1MiB"), "--num-kv-blocks and --kv-cache-bytes say the same"),
        (("--max-num-seqs", "600"), "--max-num-batched-tokens 512 is below --max-num-seqs 600: a decode step"),
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size 2: --model toy:score-table computes on one rank"),
        (("--kv-cache-bytes", "1000TiB"), "--kv-cache-bytes: the KV cache needs 1099511627776000 bytes, and "),
        (("--num-kv-blocks", "2147483647"), "--num-kv-blocks 2147483647: the KV cache needs "),
        (("--max-model-len", "999999999"), "--max-model-len 999999999 is more than the 4096 positions "),
    ],
)
def test_options_that_contradict_each_other_are_usage_errors(tmp_path, options, message):
    arguments = ("up", "--model", "toy:score-table", "--listen", "127.0.0.1:0", "--log-dir", str(tmp_path))
    result = run(*arguments, *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {message}")
    assert len(result.stderr.splitlines()) == 1


def test_port_in_use_says_so(up):
    stack = up("--model", "toy:score-table")
    second = run("up", "--model", "toy:score-table", "--listen", stack.address)
    assert second.returncode == 1
    assert f"cannot listen at {stack.address}" in second.stderr
    assert ask("generate", "--token-ids", "0", "--address", stack.address).stdout == "Small steps help\n"


def test_chat_needs_a_template(up):
    stack = up("--model", "toy:score-table")
    refused = ask("chat", "hello", "--address", stack.address)
    assert refused.exit_code == 2
    assert "chat" in refused.stderr


def test_lab_generate_agrees_with_paper():
    result = run("lab", "generate")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("the same") == len(CASES)


def test_demo_shows_answer_and_figures():
    result = run("demo", "--model", "toy:score-table", "--prompt", "<start>", "--max-tokens", "8")
    assert result.returncode == 0, result.stderr
    for part in ("Small steps help", "time to first token", "boundaries with a running step"):
        assert part in result.stdout
