"""How the command ends when something fails: an exit code, and one line on stderr.

0    done
1    it failed: nobody serves, it took too long, a service ended (the line says what to do next)
2    the input is refused, here or by the server: the line names the option, the field or the line of the file
3    `health` only: the service takes no work
130  interrupted by Ctrl-C; 143 by SIGTERM, 129 by SIGHUP: 128 and the signal's number
"""

import re
import signal
from collections.abc import Sequence

from stepahead.cli.exit_codes import EXIT_FAILURE, EXIT_USAGE
from stepahead.client import (
    DeadlineError,
    FieldViolation,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    StepaheadError,
    UnavailableError,
)

_CONSTRAINTS = {
    "json_schema": "--json-schema",
    "json_object": "--json-object",
    "regex": "--regex",
    "grammar": "--grammar",
    "choices": "--choice",
}
# Options whose name is not that of their field in the protocol.
_OPTION_OF_FIELD = {
    "stop_strings": "--stop",
    "output_top_k": "--logprobs",
    "prompt_top_k": "--prompt-logprobs",
    "choices": _CONSTRAINTS["choices"],
    "kind": "--processed-logprobs",
}
# Fields outside of those parts, up to the first dot or bracket.
_OPTION_OF_PART = {
    "num_choices": "option --num-choices",
    "request_id": "option --request-id",
    "token_ids": "option --token-ids",
    "model": "option --served-model",
    "text": "the prompt",
    "chat": "the prompt",
    "input": "the prompt",
}
# Parts of a request that hold options.
_PARTS_WITH_OPTIONS = ("sampling", "stopping", "logprobs", "constraint", "scheduling")


class StackError(Exception):
    """The locally started services could not be started, or one of them ended by itself."""

    def __init__(
        self, message: str, *, log_lines: Sequence[str] = (), advice: str = "", exit_code: int = EXIT_FAILURE
    ) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
        self.log_lines = tuple(log_lines)
        self.advice = advice
        self.is_shown = False
        """Whether the user has seen it already."""


class StackInterrupted(Exception):
    """The user asked the locally started services to stop.

    `signal_number` says how, `killed` that they asked again, `served` that everything had started before.
    """

    def __init__(self, signal_number: int, *, killed: bool, served: bool) -> None:
        super().__init__("interrupted")
        self.exit_code = 128 + signal_number
        self.killed = killed
        self.served = served


def exit_code_of(error: StepaheadError) -> int:
    """The exit code for an error of the client."""
    return EXIT_USAGE if isinstance(error, InvalidRequestError) else EXIT_FAILURE


def describe(error: StepaheadError, *, place: str = "") -> str:
    """One line: status, field, text, hint; `place` says where the request stands, such as FILE:LINE."""
    status = error.code or type(error).__name__
    # A status text may hold several lines; the first says what happened.
    text = error.message.strip().splitlines()[0]
    field = error.violations[0].field if error.violations else ""
    # Most texts name their field already.
    where = "" if field in text else f" [{field}]"
    hint = _hint(error)
    begin = f"{place}: error" if place else "error"
    return f"{begin}: {status}{where}: {text}" + (f" ({hint})" if hint else "")


def _place_of(violation: FieldViolation) -> str:
    """Where a field such as `sampling.logit_bias[0].bias` is set; empty if the command line does not set it."""
    part, *rest = re.split(r"[.\[]", violation.field)
    if violation.field == "constraint":
        given = [
            option for name, option in _CONSTRAINTS.items() if re.search(rf"\b{name}\b", violation.description)
        ]
        return f"options {', '.join(given)}" if given else ""
    if part not in _PARTS_WITH_OPTIONS:
        return _OPTION_OF_PART.get(part, "")
    if not rest:
        return ""
    option = _OPTION_OF_FIELD.get(rest[0]) or "--" + rest[0].removesuffix("_ms").replace("_", "-")
    return f"option {option}"


def _hint(error: StepaheadError) -> str:
    if error.violations and (place := _place_of(error.violations[0])):
        return place
    if error.retry_delay_s is not None:
        return f"try again in {error.retry_delay_s:g} s"
    if isinstance(error, UnavailableError):
        return "is a server running there? `stepahead up --model ...` starts one, --address names another"
    if isinstance(error, OverloadedError):
        return "try again later, or ask another server: --address"
    if isinstance(error, DeadlineError):
        return _deadline_hint(error)
    if isinstance(error, NotFoundError):
        return "`stepahead status` shows what is served"
    return ""


def _deadline_hint(error: DeadlineError) -> str:
    """What to do next, by what the request was waiting for when its time was over."""
    more = "--timeout and --queue-timeout allow more"
    if error.metadata.get("worker") == "none":
        return f"it waited for a worker, `stepahead status` shows them; {more}"
    match error.metadata.get("phase"):
        case "queue":
            return f"it waited for its turn, `stepahead status` shows the load; {more}"
        case "run":
            return "it was running; --timeout allows more, --max-tokens asks for less"
        case _:
            return more


def describe_exit(return_code: int) -> str:
    """How a process ended, in words. Negative codes are signals, as in subprocess."""
    if return_code >= 0:
        return f"exited with code {return_code}"
    return f"was ended by {signal.Signals(-return_code).name}"
