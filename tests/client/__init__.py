"""The Python client against a scripted server."""
