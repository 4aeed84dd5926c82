"""What the user sees of a stack: one bar per loading worker, one banner, one line when it stops."""

from pathlib import Path
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from stepahead.cli import announcements
from stepahead.cli.failures import StackError
from stepahead.cli.restarts import Restarts
from stepahead.cli.stack import StackOptions, StackReady


class ConsoleView:
    """Progress bars on stderr while workers load. A context manager: the bars end with it at the latest."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            # Bars need cursor movement; a log file gets the banner alone.
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._reasons: dict[str, str] = {}
        """Why each worker ended last."""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def worker_progress(self, name: str, progress: announcements.Progress) -> None:
        """Moves the worker's bar."""
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = self._progress.add_task(f"{name}: {progress.what}", total=None)
        self._progress.update(
            task,
            description=f"{name}: {progress.what}",
            total=progress.total_bytes or None,
            completed=progress.done_bytes,
        )

    def worker_ready(self, name: str) -> None:
        """Takes the worker's bar away."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self._progress.remove_task(task)

    def serving(self) -> None:
        """Ends the bars: everything has loaded."""
        self._progress.stop()

    def worker_lost(self, error: StackError) -> None:
        """Says which worker has ended; the scheduler continues its requests on the others."""
        show_stack_error(self._console, error)
        self._console.print("the other workers go on", style="bold yellow")

    def worker_restarts(self, name: str, error: StackError, restarts: Restarts, delay_s: float) -> None:
        """Says which worker has ended, and that it comes back; the reason only if it is another than last time."""
        is_new = error.message != self._reasons.get(name)
        self._reasons[name] = error.message
        what = error.message if is_new else f"{name} ended again"
        self._console.print(
            f"{what}; starting it again in {delay_s:g} s ({restarts.num_in_row} of {restarts.policy.most})",
            style="bold yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def worker_back(self, name: str) -> None:
        """Says that the worker takes work again."""
        self._console.print(f"{name} serves again", style="bold yellow")

    def failed(self, error: StackError) -> None:
        """Says why it ends, before what ends with it does."""
        self._progress.stop()
        if not self._console.quiet:
            show_stack_error(self._console, error)

    def stopping(self) -> None:
        """Says what is waited for."""
        self._progress.stop()
        self._console.print("stopping: accepted requests may finish, Ctrl-C again ends them at once", style="dim")


def show_banner(ready: StackReady, options: StackOptions, log_dir: Path | None) -> None:
    """Prints the banner on standard output."""
    console = Console()
    # Printed by click, which raises where the pipe is closed: rich would end the process from inside of the event
    # loop, without stopping the services.
    with console.capture() as captured:
        console.print(banner(ready, options, log_dir))
    click.echo(captured.get(), nl=False)


def banner(ready: StackReady, options: StackOptions, log_dir: Path | None) -> Panel:
    """What runs, how much it can hold, how to try it and how to stop it."""
    first = ready.workers[0]
    cache_bytes = sum(worker.number("kv_cache_bytes") for worker in ready.workers)
    # A cache may have room for more, which keeps prefixes.
    num_concurrent = sum(
        min(worker.amount("num_concurrent"), worker.number("max_num_seqs")) for worker in ready.workers
    )
    num_seqs = sum(worker.number("max_num_seqs") for worker in ready.workers)
    max_model_len = first.number("max_model_len")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold")
    rows.add_column(overflow="fold")
    rows.add_row("address", ready.address)
    rows.add_row("model", first.text("model"))
    rows.add_row("runs on", f"{first.text('device')}, {first.text('dtype')}, {len(ready.workers)} worker(s)")
    rows.add_row(
        "KV cache",
        f"{_size(cache_bytes)}; each worker {first.text('kv_groups')} of {first.text('block_size')} tokens",
    )
    rows.add_row("concurrency", f"up to {num_seqs} sequences, {_concurrency(num_concurrent, max_model_len)}")
    rows.add_row("overlap", options.overlap or "on")
    rows.add_row("logs", "below" if log_dir is None else str(log_dir))
    rows.add_row("try", "\n".join(_commands_to_try(ready)))
    rows.add_row("stop", "Ctrl-C")
    return Panel(rows, title="Stepahead serves", expand=False)


def _commands_to_try(ready: StackReady) -> list[str]:
    """What this model can answer."""
    address = "" if ready.address.endswith(":50051") else f" --address {ready.address}"
    if not ready.scheduler.flag("has_tokenizer"):
        return [f"stepahead generate{address} --token-ids 1,2,3"]
    generate = f'stepahead generate{address} "Once upon a time"'
    return [f"stepahead chat{address}", generate] if ready.scheduler.flag("has_chat_template") else [generate]


def _concurrency(num_concurrent: float, max_model_len: int) -> str:
    if max_model_len == 0:
        return "of any length"
    return f"{num_concurrent:.2f} of the full {max_model_len:,} tokens at once"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def show_stack_error(console: Console, error: StackError) -> None:
    """Says which service failed, its last log lines and what to do next; a second time, what has come since."""
    if not error.is_shown:
        for line in error.log_lines:
            console.print(f"  | {line}", style="dim", markup=False, highlight=False, soft_wrap=True)
        console.print(f"error: {error.message}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        if error.advice:
            console.print(error.advice, markup=False, highlight=False, soft_wrap=True)
    error.is_shown = True
    for note in getattr(error, "__notes__", ()):
        console.print(f"also: {note}", markup=False, highlight=False, soft_wrap=True)
