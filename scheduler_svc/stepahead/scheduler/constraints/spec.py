"""What a request asks of its output, as plain values, with the limits checked before anything is parsed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stepahead.scheduler.constraints.errors import ConstraintInvalid

MAX_CHOICES: Final = 1024


class ConstraintKind(StrEnum):
    """The kinds of protos/stepahead/v1/generation.proto; the value is the field's name."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICES = "choices"


MAX_BYTES: Final = {
    ConstraintKind.JSON_SCHEMA: 256 * 2**10,
    ConstraintKind.REGEX: 64 * 2**10,
    ConstraintKind.GRAMMAR: 256 * 2**10,
    # All choices together.
    ConstraintKind.CHOICES: 256 * 2**10,
}
"""Largest UTF-8 size of a constraint."""


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """One constraint. `texts` holds the choices, nothing for JSON_OBJECT, else one text.

    Making one costs microseconds: only sizes are checked. What the texts mean is checked in the sandbox.

    Raises:
        ConstraintInvalid: A size is out of range, or a text is not valid Unicode.
    """

    kind: ConstraintKind
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind is ConstraintKind.CHOICES:
            self._check_choices()
        elif len(self.texts) != (self.kind is not ConstraintKind.JSON_OBJECT):
            raise ConstraintInvalid(self.field, "takes exactly one text")
        if self.kind is ConstraintKind.JSON_OBJECT:
            return
        try:
            num_bytes = sum(len(text.encode()) for text in self.texts)
        except UnicodeEncodeError as error:
            raise ConstraintInvalid(self.field, "not valid Unicode") from error
        limit = MAX_BYTES[self.kind]
        if not num_bytes:
            raise ConstraintInvalid(self.field, "empty")
        if num_bytes > limit:
            raise ConstraintInvalid(self.field, f"{num_bytes} bytes, at most {limit}")

    @property
    def field(self) -> str:
        """Path of the field that errors name."""
        suffix = ".choices" if self.kind is ConstraintKind.CHOICES else ""
        return f"constraint.{self.kind.value}{suffix}"

    @property
    def digest(self) -> str:
        """SHA-256 over kind and texts, each text with its length before it; hex. Equal specs, equal digests."""
        hasher = hashlib.sha256(self.kind.value.encode())
        for text in self.texts:
            encoded = text.encode()
            hasher.update(len(encoded).to_bytes(8, "big") + encoded)
        return hasher.hexdigest()

    def _check_choices(self) -> None:
        if not 1 <= len(self.texts) <= MAX_CHOICES:
            raise ConstraintInvalid(self.field, f"{len(self.texts)} strings, allowed are 1 to {MAX_CHOICES}")
        for index, text in enumerate(self.texts):
            if not text:
                raise ConstraintInvalid(f"{self.field}[{index}]", "empty")
