"""Times masks, compiles and forks of structured output with a model's tokenizer; prints a Markdown table."""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from pathlib import Path

from tokenizers import Tokenizer

from stepahead.scheduler.constraints.engine import Engine, grammar_of
from stepahead.scheduler.constraints.matcher import MaskPool, Matcher
from stepahead.scheduler.constraints.spec import ConstraintKind, ConstraintSpec
from stepahead.scheduler.constraints.token_table import TokenTable, token_table
from stepahead.scheduler.text.codec import CodecSettings, TextCodec

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
    },
    "required": ["name", "age", "email"],
    "additionalProperties": False,
}
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z ]+$"} for i in range(300)}}
SPECS = {
    "json_object": ConstraintSpec(ConstraintKind.JSON_OBJECT),
    "schema, 4 properties": ConstraintSpec(ConstraintKind.JSON_SCHEMA, (json.dumps(PERSON),)),
    "schema, 300 patterns": ConstraintSpec(ConstraintKind.JSON_SCHEMA, (json.dumps(WIDE),)),
    "regex, free text": ConstraintSpec(ConstraintKind.REGEX, (r"(?s:.){1,2000}",)),
    "choices, 1024": ConstraintSpec(ConstraintKind.CHOICES, tuple(f"choice number {i}" for i in range(1024))),
    "grammar, arithmetic": ConstraintSpec(
        ConstraintKind.GRAMMAR, ('start: term (("+"|"-") term)*\nterm: /[0-9]+/ | "(" start ")"',)
    ),
}


def walk_us(beginning: Matcher, table: TokenTable, num_masks: int) -> list[float]:
    """Microseconds of each mask along random walks."""
    rng = random.Random(0)
    costs: list[float] = []
    while len(costs) < num_masks:
        matcher = beginning.fork()
        for _ in range(64):
            begin = time.perf_counter()
            mask = matcher.mask()
            costs.append((time.perf_counter() - begin) * 1e6)
            bits = int.from_bytes(mask, "little") >> rng.randrange(table.vocab_size)
            bits = bits or int.from_bytes(mask, "little")
            shift = int.from_bytes(mask, "little").bit_length() - bits.bit_length()
            token_id = shift + (bits & -bits).bit_length() - 1
            if not matcher.accept(token_id) or matcher.is_finished:
                break
    return sorted(costs)


def longest_stall_ms(engine: Engine, grammar: str) -> tuple[float, float]:
    """(longest pause of this thread, longest build) in milliseconds, while another thread builds matchers."""
    builds: list[float] = []

    def build() -> None:
        for _ in range(20):
            begin = time.perf_counter()
            engine.build(grammar)
            builds.append(time.perf_counter() - begin)

    thread = threading.Thread(target=build)
    thread.start()
    pause, last = 0.0, time.perf_counter()
    while thread.is_alive():
        now = time.perf_counter()
        pause, last = max(pause, now - last), now
    return pause * 1e3, max(builds) * 1e3


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path, help="A tokenizer.json.")
    parser.add_argument("--eos-id", type=int, required=True)
    parser.add_argument("--masks", type=int, default=5000)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    codec = TextCodec(tokenizer, settings=CodecSettings(eos_token_ids=(arguments.eos_id,)))
    begin = time.perf_counter()
    table = token_table(codec, codec.vocab_size)
    read_ms = (time.perf_counter() - begin) * 1e3
    begin = time.perf_counter()
    engine = Engine(table)
    engine_ms = (time.perf_counter() - begin) * 1e3
    print(f"token table {read_ms:.0f} ms, engine {engine_ms:.0f} ms, {table.vocab_size} ids\n")
    heads = ["constraint", "grammar ms", "build ms", "fork us", "first mask us", "mask us p50 / p99 / max"]
    print(f"| {' | '.join(heads)} | 32 rows, 2 threads us |")
    print("|---|---|---|---|---|---|---|")
    for name, spec in SPECS.items():
        begin = time.perf_counter()
        grammar = grammar_of(spec)
        grammar_ms = (time.perf_counter() - begin) * 1e3
        begin = time.perf_counter()
        beginning = engine.build(grammar)
        build_ms = (time.perf_counter() - begin) * 1e3
        begin = time.perf_counter()
        beginning.mask()
        first_us = (time.perf_counter() - begin) * 1e6
        begin = time.perf_counter()
        rows = [beginning.fork() for _ in range(32)]
        fork_us = (time.perf_counter() - begin) * 1e6 / 32
        costs = walk_us(beginning, table, arguments.masks)
        pool = MaskPool(2)
        pool.fill_masks([beginning.fork() for _ in range(2)])
        begin = time.perf_counter()
        pool.fill_masks(rows)
        pool_us = (time.perf_counter() - begin) * 1e6
        print(
            f"| {name} | {grammar_ms:.1f} | {build_ms:.1f} | {fork_us:.0f} | {first_us:.0f} | "
            f"{costs[len(costs) // 2]:.0f} / {costs[len(costs) * 99 // 100]:.0f} / {costs[-1]:.0f} | "
            f"{pool_us:.0f} |"
        )
    pause_ms, build_ms = longest_stall_ms(engine, grammar_of(SPECS["schema, 300 patterns"]))
    print(
        f"\nBuilds of 'schema, 300 patterns' of up to {build_ms:.1f} ms stop another thread for {pause_ms:.1f} ms."
    )


if __name__ == "__main__":
    main()
