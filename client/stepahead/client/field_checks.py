"""Checks Python values against the protocol's types.

Only what does not fit the types is refused (a negative count, a seed of 65 bits): whether a value makes sense is
the server's to say, so that client and server cannot disagree. Both name a field by its path in the message.
"""

import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import SupportsFloat, SupportsIndex, cast

from stepahead.client.errors import FieldViolation, invalid

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


class Fields:
    """Checks values against the protocol's types and remembers every violation.

    A checked value comes back as the protocol's type. A value that does not fit comes back as a stand-in, and
    `refuse_violations` raises before the message is used.
    """

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []

    def refuse(self, path: str, description: str) -> None:
        """Notes a violation."""
        self._violations.append(FieldViolation(path, description))

    def refuse_violations(self) -> None:
        """Raises InvalidRequestError if there are any."""
        if self._violations:
            raise invalid(self._violations)

    def integer(self, path: str, value: SupportsIndex | None, low: int, high: int) -> int | None:
        """A whole number of low .. high."""
        if value is None:
            return None
        # operator.index takes NumPy integers and refuses floats; a bool is an int to Python, but no count.
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            self.refuse(path, f"must be an integer, not {type(value).__name__}")
            return None
        number = operator.index(value)
        # One side only: the server may allow less on the other.
        if number < low:
            self.refuse(
                path, f"{number} is below {low}, the least the field holds" if low else f"{number} is negative"
            )
            return None
        if number > high:
            self.refuse(path, f"{number} is above {high}, the most the field holds")
            return None
        return number

    def uint32s(self, path: str, values: Sequence[SupportsIndex]) -> list[int]:
        """A list of 32-bit counts or ids."""
        if not self.is_list(path, values):
            return []
        checked = (self.integer(f"{path}[{index}]", value, 0, UINT32_MAX) for index, value in enumerate(values))
        return [number for number in checked if number is not None]

    def float32(self, path: str, value: SupportsFloat | None) -> float | None:
        """A number; NaN and infinities included."""
        if value is None:
            return None
        if isinstance(value, bool | str) or not hasattr(value, "__float__"):
            self.refuse(path, f"must be a number, not {type(value).__name__}")
            return None
        number = float(value)
        # NaN and infinities are values of the type; refusing them is the server's part.
        if math.isfinite(number) and abs(number) > _FLOAT32_MAX:
            self.refuse(path, f"{number} does not fit a 32-bit float")
            return None
        return number

    def milliseconds(self, path: str, seconds: float | None, *, zero: bool = False) -> int | None:
        """Seconds above 0 (`zero`: from 0 on) as milliseconds, rounded up."""
        number = self.float32(path, seconds)
        if number is None or (zero and number == 0):
            return None
        # Written so that NaN is refused too.
        if not 0 < number <= UINT32_MAX / 1000:
            least = "at least 0" if zero else "above 0"
            self.refuse(path, f"must be {least} and at most {UINT32_MAX // 1000} seconds, not {number:g}")
            return None
        return math.ceil(number * 1000)

    def string(self, path: str, value: object) -> str:
        """A text that can be encoded."""
        if not isinstance(value, str):
            self.refuse(path, f"must be a string, not {type(value).__name__}")
            return ""
        try:
            value.encode()
        except UnicodeEncodeError as error:
            self.refuse(path, f"is no valid Unicode text at character {error.start}")
            return ""
        return value

    def flag(self, path: str, value: object) -> bool | None:
        """True or False."""
        if value is not None and not isinstance(value, bool):
            self.refuse(path, f"must be true or false, not {type(value).__name__}")
            return None
        return value

    def strings(self, path: str, values: Sequence[str]) -> list[str]:
        """A list of texts."""
        if not self.is_list(path, values):
            return []
        return [self.string(f"{path}[{index}]", value) for index, value in enumerate(values)]

    def is_list(self, path: str, values: object) -> bool:
        """Whether a value is a list, and no text or mapping."""
        # NumPy arrays are no Sequence, but behave like one here.
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
            self.refuse(path, f"must be a list, not {type(cast(object, values)).__name__}")
            return False
        return True

    def json_text(self, path: str, value: object) -> str:
        """JSON text as it is, anything else as JSON."""
        if isinstance(value, str):
            return self.string(path, value)
        try:
            return self.string(path, json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            self.refuse(path, f"is no JSON: {error}")
            return ""
