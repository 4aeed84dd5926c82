"""CTranslate2's Generator on a static batch, behind the contract of peer.py: equal lengths, closed batches.

Needs a model converted with ct2-transformers-converter. A batch gives no times per token: they are spread evenly
over the run, so its throughput is measured and its latency is not.
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
    parser.add_argument("--compute-type", default="int8")
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
        count = requests[0].output_tokens
        if any(each.output_tokens != count for each in requests):
            raise SystemExit("a static batch needs equal lengths")
        generator.generate_batch(
            [[words[token] for token in each.prompt] for each in requests],
            max_length=count, min_length=count, end_token=[], include_prompt_in_result=False,
        )  # fmt: skip
        end = clock()
        return [[end * (index + 1) / count for index in range(count)] for _ in requests]

    serve(channel, f"ctranslate2 {generator.compute_type}", run, open_loop=False, version=ctranslate2.__version__)


if __name__ == "__main__":
    main()
