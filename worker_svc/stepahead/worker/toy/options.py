"""Options of a toy model: the query string of `toy:NAME?key=value&key=value`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl

from stepahead.worker.errors import OptionRefused

PREFIX = "toy:"


@dataclass(frozen=True, slots=True)
class ToySpec:
    """A parsed specification. Each `take_*` names an option the toy knows; `finish` refuses the others."""

    text: str
    name: str
    options: dict[str, str]

    def take_int(self, name: str, default: int, *, minimum: int) -> int:
        """Returns an integer option."""
        value = self.options.pop(name, None)
        if value is None:
            return default
        if not value.isdigit() or int(value) < minimum:
            raise OptionRefused(
                f"--model {self.text}: {name} must be an integer of at least {minimum}, not {value!r}"
            )
        return int(value)

    def take_float(self, name: str, default: float) -> float:
        """Returns a number of 0 or more."""
        value = self.options.pop(name, None)
        if value is None:
            return default
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0.0 <= number < 1e6:
            raise OptionRefused(f"--model {self.text}: {name} must be a number of at least 0, not {value!r}")
        return number

    def take_ids(self, name: str, default: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
        """Returns comma-separated token ids."""
        value = self.options.pop(name, None)
        if value is None:
            return default
        parts = value.split(",") if value else []
        if not all(part.isdigit() and int(part) < vocab_size for part in parts):
            raise OptionRefused(f"--model {self.text}: {name} must be token ids below {vocab_size}, not {value!r}")
        return tuple(int(part) for part in parts)

    def take_word(self, name: str, allowed: tuple[str, ...]) -> str | None:
        """Returns one of the allowed words, or None where the option is absent."""
        value = self.options.pop(name, None)
        if value is not None and value not in allowed:
            raise OptionRefused(f"--model {self.text}: {name} must be one of {', '.join(allowed)}, not {value!r}")
        return value

    def finish(self, known: tuple[str, ...]) -> None:
        """Refuses whatever was not taken."""
        if self.options:
            unknown = ", ".join(sorted(self.options))
            raise OptionRefused(
                f"--model {self.text}: unknown option {unknown}; {self.name} knows {', '.join(known)}"
            )


def parse_toy_spec(spec: str) -> ToySpec:
    """Parses `toy:NAME?options`.

    Raises:
        OptionRefused: the query string is malformed or names an option twice.
    """
    name, _, query = spec.removeprefix(PREFIX).partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise OptionRefused(f"--model {spec}: options must look like key=value&key=value") from error
    options = dict(pairs)
    if len(options) != len(pairs):
        raise OptionRefused(f"--model {spec}: an option is given twice")
    return ToySpec(spec, name, options)
