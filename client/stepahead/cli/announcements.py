"""What a service tells the process that started it: JSON lines on an inherited file descriptor.

{"event": "listening", "address": "127.0.0.1:41234"}
{"event": "progress", "what": "weights", "done": BYTES, "total": BYTES}
{"event": "ready", ...facts}
{"event": "refused", "worker": "127.0.0.1:41235", "message": "..."}
{"event": "failed", "message": "..."}
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

Fact: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Listening:
    """The service answers at this HOST:PORT, though it may still be loading."""

    address: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Part of the start-up is done; both counts are bytes."""

    what: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The service takes work. `facts` is what it says of itself."""

    facts: Mapping[str, Fact]

    def text(self, name: str) -> str:
        """A fact as text, "?" if the service did not state it."""
        return str(self.facts.get(name, "?"))

    def number(self, name: str) -> int:
        """A fact as a whole number, 0 if the service did not state one."""
        value = self.facts.get(name)
        return int(value) if isinstance(value, int | float) else 0

    def flag(self, name: str) -> bool:
        """A fact that is true or false, false if the service did not state it."""
        return self.facts.get(name) is True

    def amount(self, name: str) -> float:
        """A fact as a number, 0 if the service did not state one."""
        value = self.facts.get(name)
        return float(value) if isinstance(value, int | float) else 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """The scheduler does not take the worker at this HOST:PORT, and why. It goes on and asks again."""

    worker: str
    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The service gives up, and why."""

    message: str


Announcement: TypeAlias = Listening | Progress | Ready | Refused | Failed


def parse_announcement(line: bytes) -> Announcement | None:
    """One announcement; None for an event this version does not know. Raises ValueError for malformed lines."""
    decoded: object = json.loads(line)
    if not isinstance(decoded, dict):
        raise ValueError(f"not an object: {line!r}")
    fields = cast(dict[str, Fact], decoded)
    try:
        match fields.get("event"):
            case "listening":
                return Listening(str(fields["address"]))
            case "progress":
                return Progress(str(fields["what"]), _count(fields, "done"), _count(fields, "total"))
            case "ready":
                return Ready({name: value for name, value in fields.items() if name != "event"})
            case "refused":
                return Refused(str(fields["worker"]), str(fields["message"]))
            case "failed":
                return Failed(str(fields["message"]))
            case _:
                return None
    except KeyError as error:
        raise ValueError(f"no {error.args[0]!r} in {line!r}") from error


def _count(fields: Mapping[str, Fact], name: str) -> int:
    value = fields[name]
    if not isinstance(value, int):
        raise ValueError(f"{name} is no whole number: {value!r}")
    return value
