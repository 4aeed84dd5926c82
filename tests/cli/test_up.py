"""`stepahead up`: exit codes and what becomes of the logs. The stack itself is played."""

import tempfile
from collections.abc import Coroutine
from pathlib import Path

import pytest
from click.testing import Result

from stepahead.cli import up as up_command
from stepahead.cli.child import Child
from stepahead.cli.failures import StackError, StackInterrupted
from stepahead.cli.options import ListenAddress, Overlap, Size
from stepahead.worker.settings import parse_size


@pytest.fixture
def up(stepahead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs `up`; its stack writes a log and then ends as told. Temporary folders lie in `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(end: Exception, *arguments: str) -> Result:
        def run_stack(stack, body, *, ends_process) -> Coroutine[None, None, None]:
            for folder in tmp_path.iterdir():
                (folder / "worker.log").write_text("a line")
            return fail()

        async def fail() -> None:
            raise end

        monkeypatch.setattr(up_command, "run_stack", run_stack)
        return stepahead("up", "--model", "toy:score-table", "--listen", "127.0.0.1:0", *arguments)

    return run


@pytest.mark.parametrize(
    ("end", "exit_code", "kept"),
    [
        (StackInterrupted(2, killed=False, served=True), 0, False),
        (StackInterrupted(2, killed=True, served=True), 130, True),
        (StackInterrupted(2, killed=False, served=False), 130, True),
        (StackInterrupted(15, killed=False, served=False), 143, True),
        (StackError("worker exited with code 1"), 1, True),
    ],
)
def test_only_a_clean_stop_is_success_and_takes_its_logs_along(up, tmp_path, end, exit_code, kept):
    assert up(end).exit_code == exit_code
    assert [path.name for path in tmp_path.rglob("*.log")] == (["worker.log"] if kept else [])
    assert bool(list(tmp_path.iterdir())) is kept


def test_an_interrupt_before_it_serves_is_told_with_the_logs_folder(up, tmp_path):
    result = up(StackInterrupted(2, killed=False, served=False))
    (folder,) = tmp_path.iterdir()
    assert result.stderr == f"interrupted before it served; logs are in {folder}\n"


def test_a_chosen_log_folder_stays(up, tmp_path):
    logs = tmp_path / "logs"
    assert up(StackInterrupted(2, killed=False, served=True), "--log-dir", str(logs)).exit_code == 0
    assert (logs / "worker.log").exists()


def test_a_log_folder_that_cannot_be_made_is_told_in_one_line(up, tmp_path):
    file = tmp_path / "a-file"
    file.touch()
    result = up(StackInterrupted(2, killed=False, served=True), "--log-dir", str(file / "x"))
    assert result.exit_code == 2
    assert result.stderr == f"error: cannot write logs in {file / 'x'} (--log-dir): Not a directory\n"


async def test_a_log_that_cannot_be_opened_is_an_input_error(tmp_path):
    with pytest.raises(StackError) as caught:
        await Child.start("worker", ["true"], tmp_path)
    assert (caught.value.message, caught.value.exit_code) == (f"cannot write the log {tmp_path}: Is a directory", 2)


@pytest.mark.parametrize("command", ["up", "demo"])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--tensor-parallel-size", "0", "0 is not in the range 1<=x<=1024"),
        ("--block-size", "0", "0 is not in the range 1<=x<=1024"),
        ("--block-size", "1025", "1025 is not in the range"),
        ("--max-num-seqs", "0", "range 1<=x<="),
        ("--max-num-batched-tokens", "-3", "range 1<=x<="),
        ("--max-num-batched-tokens", "2147483648", "range 1<=x<=2147483647"),
        ("--num-kv-blocks", "0", "range 1<=x<="),
        ("--max-model-len", "1", "range 2<=x<="),
        ("--threads", "5000", "1<=x<=256"),
        ("--kv-cache-bytes", "5XB", "'5XB' is not a size; write for example 2GiB"),
        ("--kv-cache-bytes", "2gib", "is not a size"),
        ("--kv-cache-bytes", "0", "at least 1 byte"),
        ("--overlap", "9", "'9' is not on, off or a depth from 0 to 8"),
        ("--overlap", "-1", "is not on, off or a depth"),
        ("--model", "", "'' does not exist"),
        ("--model", "/nope", "'/nope' does not exist"),
        ("--model", "./nope", "'./nope' does not exist"),
        ("--model", "nope.gguf", "'nope.gguf' does not exist"),
    ],
)
def test_wrong_values_are_usage_errors_that_name_the_option(stepahead, command, option, value, said):
    result = stepahead(command, "--model", "toy:score-table", option, value)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("foo", "'foo' is not HOST:PORT"),
        (":50051", "is not HOST:PORT"),
        ("host:http", "is not HOST:PORT"),
        ("::1:50051", "is not HOST:PORT"),
        ("127.0.0.1:70000", "port 70000 is over 65535"),
        ("unix:", "is not HOST:PORT"),
    ],
)
def test_wrong_addresses_are_usage_errors(stepahead, address, said):
    result = stepahead("up", "--model", "toy:score-table", "--listen", address)
    assert (result.exit_code, "Invalid value for '--listen'" in result.stderr) == (2, True)
    assert said in result.stderr


def test_right_values_are_passed_on_as_given():
    for text in ("1048576", "2GiB", "500MB", "1.5 KiB", "7B", "3kB"):
        assert Size().convert(text, None, None) == text
        assert parse_size(text) > 0
    for text in ("on", "off", "0", "8"):
        assert Overlap().convert(text, None, None) == text
    for text in ("0.0.0.0:0", "[::1]:80", "localhost:65535", "unix:/run/stepahead"):
        assert ListenAddress().convert(text, None, None) == text
