"""CTranslate2's Generator on a static batch, behind the contract of peer.py: equal lengths, closed batches.

Needs a model converted with ct2-transformers-converter. It refuses to compute in bfloat16 on CPUs where it
has no fast way to; float32 is then the nearest precision, int8 the fastest.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

from peer import Request, serve, take_stdout


def main() -> None:
    """Loads the model and serves."""
    channel = take_stdout()
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--compute-type", default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()

    import ctranslate2

    generator = ctranslate2.Generator(
        arguments.model, device="cpu", compute_type=arguments.compute_type, intra_threads=arguments.threads
    )
    # The generator takes tokens as text; the converter wrote the vocabulary in the order of the ids.
    vocabulary = Path(arguments.model, "vocabulary.json")
    words = json.loads(vocabulary.read_text(encoding="utf-8"))

    def run(requests: list[Request], clock: Callable[[], float]) -> list[list[float]]:
        if len({(len(each.prompt), each.output_tokens) for each in requests}) > 1:
            raise SystemExit("a static batch needs equal lengths")
        count = requests[0].output_tokens
        times: list[list[float]] = [[] for _ in requests]

        def note(step: ctranslate2.GenerationStepResult) -> bool:
            times[step.batch_id].append(clock())
            return False  # go on

        generator.generate_batch(
            [[words[token] for token in each.prompt] for each in requests],
            max_length=count, min_length=count, end_token=[], include_prompt_in_result=False,
            callback=note,
        )  # fmt: skip
        return times

    serve(channel, f"ctranslate2 {generator.compute_type}", run, open_loop=False, version=ctranslate2.__version__)


if __name__ == "__main__":
    main()
