"""Errors of structured output.

ConstraintError
|- ConstraintInvalid       the client's constraint is wrong, unsupported or too costly; names the field
|- ConstraintBusy          too many constraints wait for a compile; trying again later helps
|- ConstraintUnavailable   the sandbox cannot be started, or the compiler is closed: not the client's fault
|  `- ConstraintUnsupported  the model's tokenizer allows no constraint at all: trying again does not help
`- MatcherError            one running choice cannot go on; its neighbours are untouched
   |- TokenRejected        the grammar does not allow a token that was delivered (rule I5)
   |- NothingAllowed       no token is allowed at all (rule I7)
   `- MatcherFailed        a limit of the engine was reached while a mask was computed
"""

from __future__ import annotations


class ConstraintError(Exception):
    """Base of every error of this package. The message may be shown to a client."""


class ConstraintInvalid(ConstraintError):
    """The request must be refused with INVALID_ARGUMENT."""

    def __init__(self, field: str, description: str) -> None:
        """Keeps both parts.

        Args:
            field: Path as in the proto, e.g. `constraint.json_schema`.
            description: What is wrong; for a JSON Schema it begins with the JSON pointer of the keyword.
        """
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class ConstraintBusy(ConstraintError):
    """The request may be sent again later (RESOURCE_EXHAUSTED)."""


class ConstraintUnavailable(ConstraintError):
    """Constraints cannot be compiled now."""


class ConstraintUnsupported(ConstraintUnavailable):
    """The model's tokenizer allows no constraint (INVALID_ARGUMENT)."""


class MatcherError(ConstraintError):
    """Ends one choice."""


class TokenRejected(MatcherError):
    """The grammar does not allow a token of the history."""

    def __init__(self, index: int, token_id: int) -> None:
        """Keeps both parts.

        Args:
            index: Place of the token among the choice's output tokens, from 0.
            token_id: The token.
        """
        super().__init__(f"constraint: output token {index} (id {token_id}) does not fit the grammar")
        self.index = index
        self.token_id = token_id


class NothingAllowed(MatcherError):
    """No token can follow: the tokenizer cannot write what the grammar wants, or the end is suppressed."""


class MatcherFailed(MatcherError):
    """The engine gave up; its state must not be used again."""
