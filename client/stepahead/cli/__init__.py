"""The `stepahead` command. main.py lists the subcommands."""
