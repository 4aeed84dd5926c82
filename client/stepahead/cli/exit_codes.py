"""How commands end. Imports nothing: the first module of every command needs it."""

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130
