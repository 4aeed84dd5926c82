"""The `stepahead` command."""
