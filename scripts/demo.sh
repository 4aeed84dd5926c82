#!/bin/sh
# Everything from nothing: makes the environment, fetches a small model, serves it, asks it one question, stops.
# Arguments go to `stepahead demo` (try --overlap off, --workers 2, --prompt "...").
set -eu
cd "$(dirname "$0")/.."
make -s setup smollm2
model=$(find .cache/models -name '*.gguf' | sort | head -n 1)
if [ -z "$model" ]; then
    echo "no .gguf file under .cache/models after make smollm2" >&2
    exit 1
fi
exec .venv/bin/stepahead demo --model "$model" "$@"
