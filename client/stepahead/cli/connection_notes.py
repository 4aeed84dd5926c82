"""What is said while a stream is without its connection: one line when it is lost, one when it is back."""

import click

from stepahead.client import ConnectionChange


class ConnectionNotes:
    """Lines on stderr about the connection to `address`; streams that break together are one break."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_lost = False

    def __call__(self, change: ConnectionChange) -> None:
        """As `OnConnectionChange`."""
        if change.is_lost == self._is_lost:
            return
        self._is_lost = change.is_lost
        if change.is_lost:
            click.echo(
                f"connection to {self._address} lost; trying again, {change.seconds_left:.0f} s left", err=True
            )
        else:
            click.echo(f"connection to {self._address} is back", err=True)
