"""`stepahead health`: whether a service takes work, as an exit code; for containers and scripts."""

import click
import grpc

from stepahead.cli.exit_codes import EXIT_UNAVAILABLE
from stepahead.cli.options import CONTEXT_SETTINGS, Seconds, address_option
from stepahead.client.channel import open_channel

# grpc.health.v1: the request names no service, the answer is HealthCheckResponse{status: SERVING}. Spelt out,
# because the package with the stubs belongs to the services and this command must work without them.
_METHOD = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"


@click.command(context_settings=CONTEXT_SETTINGS)
@address_option
@click.option("--timeout", type=Seconds(0.1), default=3.0, help="Seconds to wait for the answer.")
def health(address: str, timeout: float) -> None:
    """Ask a scheduler or worker whether it takes work: exit code 0 if so, 3 if not."""
    with open_channel(address) as channel:
        check = channel.unary_unary(_METHOD, _as_is, _as_is)
        try:
            serving = check(b"", timeout=timeout) == _SERVING
        except grpc.RpcError as error:
            # The stubs do not say that an error of a call is a grpc.Call too.
            name = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
            click.echo(f"error: no health at {address}: {name}", err=True)
            raise SystemExit(EXIT_UNAVAILABLE) from error
    click.echo("serving" if serving else "not serving")
    if not serving:
        raise SystemExit(EXIT_UNAVAILABLE)


def _as_is(message: bytes) -> bytes:
    return message
