"""The speed probe: one line per line, and rates that follow from what it says it did."""

import json
import subprocess
import sys

import pytest

from stepahead.kernels.cpu.step import speed
from stepahead.kernels.cpu.step.build import BuildUnavailable
from stepahead.kernels.cpu.step.library import instruction_sets


def has_library() -> bool:
    try:
        return bool(instruction_sets())
    except BuildUnavailable:
        return False


pytestmark = pytest.mark.skipif(not has_library(), reason="there is no compiler or no AVX2 here")


def test_the_probe_answers_every_line_until_its_input_ends():
    command = [
        sys.executable,
        "-m",
        "stepahead.kernels.cpu.step.speed",
        "--weight-bytes",
        "1000000",
        "--threads",
        "1",
    ]
    done = subprocess.run(command, input="\n\n", capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 2
    for answer in answers:
        assert set(answer) == {"read_bytes_per_s", "flops_per_s"}
        assert min(answer.values()) > 0


def test_the_probe_reads_as_much_as_it_is_told():
    step = speed.probe_step(20_000_000, 1)
    num_bytes = step.probe(speed.Probe.READ, 1)
    # The rest of the layer comes on top: seven matrices of 512 x 512.
    assert 20_000_000 <= num_bytes <= 20_000_000 + 8 * 512 * 512 * 4
    step.close()
