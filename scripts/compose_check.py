"""What compose-test.sh checks once the images are there; needs the docker-compose binary as its argument."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from stepahead.client import Client

ROOT = Path(__file__).resolve().parent.parent
MODEL_DIR = ROOT / ".cache" / "models"
BOUND_S = 180.0
PROMPT = (1, 2, 3)
NUM_TOKENS = 150
SLEEP_MODEL = "toy:sleep?ms=20"


class Stack:
    """The compose project, as its user drives it."""

    def __init__(self, compose: str, port: int) -> None:
        self._compose = compose
        self._environment = {**os.environ, "STEPAHEAD_PORT": str(port), "STEPAHEAD_MODEL_DIR": str(MODEL_DIR)}
        self.address = f"127.0.0.1:{port}"

    def run(self, *arguments: str, **environment: str) -> str:
        """A compose command; its output. Raises SystemExit with what it said if it fails."""
        self._environment |= environment
        result = subprocess.run(
            [self._compose, *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            sys.exit(f"docker-compose {' '.join(arguments)}: {result.stderr}")
        return result.stdout

    def up(self, *, workers: int, **environment: str) -> None:
        """Starts what is missing and waits until everything is healthy."""
        started_s = time.monotonic()
        self.run("up", "-d", "--wait", "--scale", f"worker={workers}", **environment)
        for service, count in (("worker", workers), ("scheduler", 1)):
            states = [(str(each["State"]), str(each["Health"])) for each in self.containers(service)]
            if states != [("running", "healthy")] * count:
                sys.exit(f"failed: {count} healthy {service} container(s), but {states}")
        note(f"up with {workers} worker(s), all healthy", time.monotonic() - started_s)

    def containers(self, service: str) -> list[dict[str, object]]:
        """What compose knows of a service's running containers."""
        return [json.loads(line) for line in self.run("ps", "--format", "json", service).splitlines()]


def note(what: str, seconds: float) -> None:
    """One line of the report."""
    print(f"{what:<34} {seconds:6.1f} s", flush=True)


def must(condition: bool, what: str) -> None:  # noqa: FBT001 - reads like an assertion that no flag removes
    """Ends the check with a sentence unless it holds."""
    if not condition:
        sys.exit(f"failed: {what}")
    print(f"  ok: {what}", flush=True)


def wait_for_workers(client: Client, count: int) -> None:
    """Until exactly so many workers are known and connected."""
    started_s = time.monotonic()
    while time.monotonic() - started_s < BOUND_S:
        workers = client.status().workers
        if len(workers) == count and all(worker.connected for worker in workers):
            note(f"scheduler knows {count} worker(s)", time.monotonic() - started_s)
            return
        time.sleep(0.1)
    sys.exit(f"failed: {count} workers connected within {BOUND_S:g} s, but {client.status().workers}")


def check_containers(stack: Stack) -> None:
    """Users, file systems and ports are as the compose file promises."""
    for service in ("scheduler", "worker"):
        who = stack.run("exec", "-T", service, "id", "-u").strip()
        must(who == "10001", f"{service} runs as user {who}")
        probe = "import pathlib\ntry: pathlib.Path('/opt/x').touch()\nexcept OSError as e: print(e.errno)"
        must(
            stack.run("exec", "-T", service, "python", "-c", probe).strip() == "30", f"{service}: root is read-only"
        )
    probe = "import importlib.util as u; print(u.find_spec('torch'))"
    must(stack.run("exec", "-T", "scheduler", "python", "-c", probe).strip() == "None", "scheduler has no torch")
    published = {
        (port["URL"], port["PublishedPort"])
        for service in ("scheduler", "worker")
        for container in stack.containers(service)
        for port in container["Publishers"]  # type: ignore[attr-defined]
        if port["PublishedPort"]
    }
    must(published == {("127.0.0.1", int(stack.address.rpartition(":")[2]))}, f"published: {published}")


def check_real_model(stack: Stack) -> None:
    """A real model from the mounted folder, if `make smollm2` has fetched one."""
    found = sorted(MODEL_DIR.glob("*.gguf"))
    if not found:
        print("  SKIPPED: no real model; make smollm2 fetches one")
        return
    stack.up(workers=1, STEPAHEAD_MODEL=f"/models/{found[0].name}", STEPAHEAD_THREADS="1")
    with Client(stack.address) as client:
        started_s = time.monotonic()
        with client.stream("The capital of France is", max_tokens=16, temperature=0.0) as stream:
            pieces = [delta.text for delta in stream]
            answer = stream.completion()
        note(f"{len(answer.token_ids)} tokens of a real model", time.monotonic() - started_s)
    must(len(pieces) > 1 and "Paris" in answer.text, f"streamed in {len(pieces)} pieces: {answer.text!r}")


def check_loss(stack: Stack) -> None:
    """Two workers, one is killed in the middle of an answer: the answer is the same."""
    stack.up(workers=1, STEPAHEAD_MODEL=SLEEP_MODEL)
    with Client(stack.address) as client:
        expected = client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, text=False).token_ids
        stack.up(workers=2)
        wait_for_workers(client, 2)
        with client.stream(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, text=False) as stream:
            tokens = list(next(stream).token_ids)
            (busy,) = [worker.address for worker in client.status().workers if worker.num_running]
            killed = next(
                str(container["Name"])
                for container in stack.containers("worker")
                if busy.startswith(address_of(str(container["Name"])))
            )
            killed_s = time.monotonic()
            subprocess.run(["docker", "kill", killed], check=True, capture_output=True)
            num_before = len(tokens)
            for delta in stream:
                if len(tokens) == num_before:
                    note(f"killed {killed}, next token", time.monotonic() - killed_s)
                tokens += delta.token_ids
            answer = stream.completion()
        must(tuple(tokens) == expected, f"the answer is the same; {answer.timings.preemptions} preemption(s)")
        must(answer.timings.preemptions >= 1, "the killed worker was the one that ran it")
        wait_for_workers(client, 1)


def address_of(container: str) -> str:
    """The container's address in the project's network."""
    form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    command = ["docker", "inspect", "--format", form, container]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() + ":"


def main() -> None:
    """All checks in order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stack = Stack(sys.argv[1], port)
    stack.up(workers=1, STEPAHEAD_MODEL="toy:score-table")
    with Client(stack.address) as client:
        with client.stream([0], max_tokens=8, temperature=0.0) as stream:
            text = "".join(delta.text for delta in stream)
        must(text == "Small steps help", f"streamed {text!r}")
    check_containers(stack)
    check_real_model(stack)
    check_loss(stack)
    started_s = time.monotonic()
    stack.run("down", "--timeout", "30")
    note("down", time.monotonic() - started_s)


if __name__ == "__main__":
    main()
