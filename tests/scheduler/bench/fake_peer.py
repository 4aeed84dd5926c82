"""The far end of a peer, without a scheduler: every step takes 3 us, of which 2 us are its own."""

import json
import sys
from pathlib import Path

for line in sys.stdin:
    command = json.loads(line)
    if "open" in command:
        assert Path(command["open"]["workloads"]).name == "workloads.py"
        num_rows = command["open"]["rows"]
        answer = {"name": f"fake {command['open']['scheduler']}"}
    else:
        num_steps = command["run"]
        answer = {
            "wall_ns": [3000] * num_steps,
            "cpu_ns": [2000] * num_steps,
            "submit_ns": [],
            "num_tokens": num_rows * num_steps,
        }
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
