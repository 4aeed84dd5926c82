"""The command line: parsing, output, exit codes, and supervision of local services."""
