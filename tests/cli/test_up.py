"""`stepahead up`: exit codes and what becomes of the logs. The stack itself is played."""

import tempfile
from collections.abc import Coroutine
from pathlib import Path

import pytest
from click.testing import Result

from stepahead.cli import up as up_command
from stepahead.cli.failures import StackError, StackInterrupted


@pytest.fixture
def up(stepahead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs `up`; its stack writes a log and then ends as told. Temporary folders lie in `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(end: Exception, *arguments: str) -> Result:
        def run_stack(stack, body) -> Coroutine[None, None, None]:
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
        (StackInterrupted(killed=False, served=True), 0, False),
        (StackInterrupted(killed=True, served=True), 130, True),
        (StackInterrupted(killed=False, served=False), 130, True),
        (StackError("worker exited with code 1"), 1, True),
    ],
)
def test_only_a_clean_stop_is_success_and_takes_its_logs_along(up, tmp_path, end, exit_code, kept):
    assert up(end).exit_code == exit_code
    assert [path.name for path in tmp_path.rglob("*.log")] == (["worker.log"] if kept else [])
    assert bool(list(tmp_path.iterdir())) is kept


def test_an_interrupt_before_it_serves_is_told_with_the_logs_folder(up, tmp_path):
    result = up(StackInterrupted(killed=False, served=False))
    (folder,) = tmp_path.iterdir()
    assert result.stderr == f"interrupted before it served; logs are in {folder}\n"


def test_a_chosen_log_folder_stays(up, tmp_path):
    logs = tmp_path / "logs"
    assert up(StackInterrupted(killed=False, served=True), "--log-dir", str(logs)).exit_code == 0
    assert (logs / "worker.log").exists()
