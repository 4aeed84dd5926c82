"""Before services start on this machine: are they installed, is the port free, where do their logs go."""

import importlib.util
import shutil
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import click

from stepahead.cli.exit_codes import EXIT_USAGE
from stepahead.cli.failures import StackError, StackInterrupted

# One module per dependency that an extra brings and that its service imports first.
_MODULES_OF_EXTRA = {
    "scheduler": ("structlog", "tokenizers", "grpc_health"),
    "worker": ("structlog", "tokenizers", "grpc_health", "numpy", "torch", "transformers"),
}


def require_extras(*extras: str) -> None:
    """Raises click.ClickException naming what to install if an extra's packages are missing."""
    missing = [
        module
        for extra in extras
        for module in _MODULES_OF_EXTRA[extra]
        # Looks for the module without importing it: this process must stay small.
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        wanted = ",".join(extras)
        raise click.ClickException(
            f"not installed: {', '.join(dict.fromkeys(missing))}. Install the services with\n"
            f"    pip install 'stepahead[{wanted}]'"
        )


def require_free_port(listen: str) -> None:
    """Raises StackError if HOST:PORT is taken: better now than after the weights have loaded.

    An address that cannot be checked here is left to the scheduler, which binds it for good.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) == 0:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        return
    with socket.socket(family, kind, protocol) as probe:
        # Connections of an earlier server that are still closing do not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise StackError(
                f"cannot listen at {listen}: {error.strerror or error}",
                advice="stop the other server, or choose another port with --listen HOST:PORT (port 0: any free)",
            ) from error


def make_log_dir(log_dir: Path | None, *, verbose: bool) -> Path | None:
    """The folder of the services' logs, or None to show them on stderr. Raises StackError if it cannot be made."""
    if verbose:
        return None
    try:
        if log_dir is None:
            return Path(tempfile.mkdtemp(prefix="stepahead-"))
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = "in the temporary folder" if log_dir is None else f"in {log_dir} (--log-dir)"
        raise StackError(f"cannot write logs {where}: {error.strerror}", exit_code=EXIT_USAGE) from error
    return log_dir


@contextmanager
def kept_log_dir(log_dir: Path | None, *, verbose: bool) -> Generator[Path | None, None, None]:
    """As `make_log_dir`, for a run that ends when it is told to: a temporary folder goes if the run ends well."""
    logs = make_log_dir(log_dir, verbose=verbose)
    yield logs
    if log_dir is None:
        _remove(logs)


@contextmanager
def passing_log_dir(*, verbose: bool) -> Generator[Path | None, None, None]:
    """As `make_log_dir`, for a run that ends by itself: the folder stays only if the run fails."""
    log_dir = make_log_dir(None, verbose=verbose)
    try:
        yield log_dir
    except (StackInterrupted, KeyboardInterrupt):
        _remove(log_dir)
        raise
    _remove(log_dir)


def _remove(log_dir: Path | None) -> None:
    if log_dir is not None:
        shutil.rmtree(log_dir)
