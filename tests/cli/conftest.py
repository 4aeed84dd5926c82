"""Fixtures: a fake scheduler, and the command run in this process."""

from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from stepahead.cli.main import main
from tests.client.fake_server import FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def stepahead() -> Callable[..., Result]:
    """Runs `stepahead ARGUMENTS` and returns its output and exit code; programming errors are raised."""

    def run(*arguments: str, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
        result = CliRunner().invoke(main, arguments, input=stdin, env=env)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
