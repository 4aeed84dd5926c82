"""Structured output: outputs that are restricted to a language.

A client's constraint is parsed, compiled and tried in a killable process (sandbox.py, compiler.py). What passes is
built again in this process, and each choice gets a matcher (matcher.py): which tokens may come next, and may this
one. The engine, llguidance, is imported by engine.py, matcher.py and sandbox.py only, and those by nobody before a
model's compiler is started. docs/structured-output.md tells what is supported.
"""
