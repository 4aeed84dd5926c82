"""Starting services on this machine: are they installed, where do their logs go."""

import importlib.util
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import click

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


def make_log_dir(log_dir: Path | None, *, verbose: bool) -> Path | None:
    """The folder of the services' logs, or None to show them on stderr."""
    if verbose:
        return None
    if log_dir is None:
        return Path(tempfile.mkdtemp(prefix="stepahead-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    return log_dir


@contextmanager
def passing_log_dir(*, verbose: bool) -> Generator[Path | None, None, None]:
    """As `make_log_dir`, for a run that ends by itself: the folder stays only if the run fails."""
    log_dir = make_log_dir(None, verbose=verbose)
    yield log_dir
    if log_dir is not None:
        shutil.rmtree(log_dir)
