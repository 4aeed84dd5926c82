"""A peer for tests: answers a workload at once with made-up times, or misbehaves as its argument says."""

import json
import sys


def say(fields: dict) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(behaviour: str) -> None:
    say({"ready": "made-up", "open_loop": behaviour == "open", "version": "1"})
    for line in sys.stdin:
        requests = json.loads(line)["requests"]
        if behaviour == "dies":
            sys.exit(3)
        if behaviour == "fails":
            say({"error": "out of ideas"})
            continue
        short = behaviour == "short"
        counts = [each["output_tokens"] - short for each in requests]
        times = [
            [each["at_s"] + 0.5 + 0.25 * index for index in range(count)]
            for each, count in zip(requests, counts, strict=True)
        ]
        say({"token_times_s": times})


if __name__ == "__main__":
    main(sys.argv[1])
