"""One service as a child process."""

import asyncio
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import BinaryIO, Self

from stepahead.cli.announcements import Announcement, Failed, parse_announcement
from stepahead.cli.exit_codes import EXIT_USAGE
from stepahead.cli.failures import StackError, describe_exit

_NUM_TAIL_LINES = 15
_TETHERED = (sys.executable, "-I", "-S", str(Path(__file__).with_name("tethered.py")))


class Child:
    """A started service: its announcements, its exit, its log.

    It runs in a session of its own, so that Ctrl-C in the terminal reaches only the parent, which then
    stops the services in the right order. It does not outlive the parent (tethered.py).
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        announcements: asyncio.StreamReader,
        log_path: Path | None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process
        self._announcements = announcements
        self._failure = ""

    @classmethod
    async def start(cls, name: str, argv: Sequence[str], log_path: Path | None) -> Self:
        """Starts `argv` with an announcement pipe. Its output goes to `log_path`, or to our stderr if None.

        Raises StackError if the log cannot be opened.
        """
        read_fd, write_fd = os.pipe()
        try:
            reader = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", buffering=0)
            )
            # The file object is closed right away: the child has its own descriptor.
            log_file = None if log_path is None else _open_log(log_path)
            try:
                process = await asyncio.create_subprocess_exec(
                    *_TETHERED,
                    str(os.getpid()),
                    *argv,
                    "--announce-fd",
                    str(write_fd),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=2 if log_file is None else log_file,
                    stderr=2 if log_file is None else log_file,
                    pass_fds=(write_fd,),
                    start_new_session=True,
                )
            finally:
                if log_file is not None:
                    log_file.close()
        finally:
            # While the parent holds this end, the pipe would not end with the child.
            os.close(write_fd)
        return cls(name, process, reader, log_path)

    @property
    def pid(self) -> int:
        """The process, as the system numbers it."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not been seen to end."""
        return self._process.returncode is None

    async def announcements(self) -> AsyncIterator[Announcement]:
        """What the service says, until its end of the pipe closes. Raises StackError for a malformed line."""
        while line := await self._announcements.readline():
            try:
                announcement = parse_announcement(line)
            except ValueError as error:
                raise StackError(f"{self.name} announced something malformed: {error}") from error
            if isinstance(announcement, Failed):
                self._failure = announcement.message
            if announcement is not None:
                yield announcement

    async def wait(self) -> int:
        """Waits for the end; returns the exit code, negative for a signal."""
        return await self._process.wait()

    async def death(self) -> StackError:
        """Waits for the end and says what is known about it."""
        return_code = await self.wait()
        async for _ in self.announcements():
            # Only the last words matter now, and `announcements` keeps them.
            pass
        if return_code == EXIT_USAGE and self._failure:
            # Its options are ours, passed on: what is wrong with them is all there is to say.
            return StackError(self._failure, exit_code=EXIT_USAGE)
        message = f"{self.name} {describe_exit(return_code)}"
        if self._failure:
            message += f": {self._failure}"
        return StackError(message, log_lines=self.log_tail(), advice=self._advice(return_code))

    def send_signal(self, signal_number: int) -> None:
        """Signals the process, if it still runs."""
        if not self.running:
            return
        # Not Popen.send_signal: it polls, and would take the exit status away from asyncio's own waiting.
        try:
            os.kill(self._process.pid, signal_number)
        except ProcessLookupError:
            # It ended just now; `wait` learns of it next.
            return

    def log_tail(self) -> tuple[str, ...]:
        """The last lines of its log; empty if the log went to our stderr."""
        if self.log_path is None:
            return ()
        with self.log_path.open(encoding="utf-8", errors="replace") as lines:
            return tuple(line.rstrip() for line in deque(lines, maxlen=_NUM_TAIL_LINES))

    def where_its_log_is(self) -> str:
        """Where to read more, for a person."""
        if self.log_path is None:
            return "its log is above"
        return f"its whole log is in {self.log_path}; -v shows logs as they are written"

    def _advice(self, return_code: int) -> str:
        if return_code == -9:
            return (
                "something killed it, most likely the system when memory ran out: "
                "try fewer --workers, a smaller --kv-cache-bytes or a smaller model"
            )
        return self.where_its_log_is()


def _open_log(path: Path) -> BinaryIO:
    try:
        return path.open("ab")
    except OSError as error:
        raise StackError(f"cannot write the log {path}: {error.strerror}", exit_code=EXIT_USAGE) from error
