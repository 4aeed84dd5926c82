"""transformers' generate() on one static batch, behind the contract of peer.py: equal lengths, closed batches."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from peer import Request, serve, take_stdout


def main() -> None:
    """Loads the model and serves."""
    channel = take_stdout()
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()

    import torch
    import transformers

    torch.set_num_threads(arguments.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype), attn_implementation="sdpa"
    ).eval()

    class Stopwatch(transformers.StoppingCriteria):
        """Ends nothing: it is asked after every step, and notes when."""

        def __init__(self, clock: Callable[[], float]) -> None:
            self.times: list[float] = []
            self._clock = clock

        def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            self.times.append(self._clock())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    @torch.inference_mode()
    def run(requests: list[Request], clock: Callable[[], float]) -> list[list[float]]:
        if len({(len(each.prompt), each.output_tokens) for each in requests}) > 1:
            raise SystemExit("a static batch needs equal lengths")
        count = requests[0].output_tokens
        ids = torch.tensor([each.prompt for each in requests])
        watch = Stopwatch(clock)
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
            pad_token_id=0, eos_token_id=None, stopping_criteria=[watch],
        )  # fmt: skip
        return [list(watch.times) for _ in requests]

    serve(channel, f"transformers static {arguments.dtype}", run, open_loop=False, version=transformers.__version__)


if __name__ == "__main__":
    main()
