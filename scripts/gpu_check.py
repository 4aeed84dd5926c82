#!/usr/bin/env python3
"""Everything there is to know about the CUDA worker on one GPU, within eight minutes: `make gpu-check`.

Where there are two GPUs, tensor parallel on them takes up to two minutes more; on one that part is skipped.

    python scripts/gpu_check.py [--out DIR] [--only PART ...] [--dry-run]

Each part runs in a process of its own with a limit of its own: one that fails or hangs stops no other. Writes
DIR/gpu-check.json and DIR/gpu-check.md, and prints the latter. Nothing is downloaded: weights are random. It needs
torch for CUDA, CuPy, g++, and the packages that `python -m stepahead.worker` imports (beside those: structlog,
tokenizers, safetensors); the part `stack` needs the services installed (pip install -e '.[scheduler,worker,cuda]').
With --dry-run every line runs on this CPU with tiny sizes; figures mean nothing then.

Exit code: how many parts failed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("client", "protos", "scheduler_svc", "worker_svc", "kernels")
PATHS = [str(ROOT), str(ROOT / "scripts"), *(str(ROOT / name) for name in PACKAGES)]
sys.path[:0] = PATHS


@dataclass(frozen=True, slots=True)
class Part:
    """A function of a module that takes a `Rig` and gives rows."""

    name: str
    module: str
    function: str
    limit_s: int
    gpus: int = 1
    """It runs where there are so many; beside the others' eight minutes if more than one."""


PARTS = (
    Part("kernels", "gpu_check_kernels", "compare", 75),
    Part("tokens", "gpu_check_steps", "tokens", 45),
    Part("waits", "gpu_check_steps", "waits", 30),
    Part("attention", "gpu_check_attention", "attention", 50),
    Part("floors", "gpu_check_kernels", "floors", 50),
    Part("decode", "gpu_check_steps", "decode", 110),
    Part("ranks", "gpu_check_ranks", "ranks", 120, gpus=2),
)
SANITIZER_S, STACK_S = 50, 70
SKIPPED = "skipped"


def run_part(part: Part, *, small: bool, write: Callable[[dict[str, object]], object]) -> None:
    """Runs a part in this process; `write` is told every row as soon as it is there."""
    import torch  # noqa: PLC0415 - the parent process needs none
    from gpu_check_rig import open_rig  # noqa: PLC0415

    with torch.inference_mode():
        for row in getattr(importlib.import_module(part.module), part.function)(open_rig(small=small)):
            write(row)


def in_process_of_its_own(part: Part, out: Path, prefix: tuple[str, ...] = ()) -> dict[str, object]:
    """Runs a part in a child; returns its rows, as far as it got, and how it ended."""
    rows_file, log_file = out / f"{part.name}.rows", out / f"{part.name}.log"
    rows_file.write_text("")
    command = [*prefix, sys.executable, __file__, "--part", part.name, "--rows", str(rows_file)]
    begin = time.monotonic()
    with log_file.open("w", encoding="utf-8") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=log, timeout=part.limit_s, check=False).returncode
            ended = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {part.limit_s} s"
    rows = [json.loads(line) for line in rows_file.read_text(encoding="utf-8").splitlines()]
    return _result(rows, ended, begin, log_file)


def in_this_process(part: Part) -> dict[str, object]:
    """Runs a part of a dry run; what it raises is for whoever runs it to see."""
    rows: list[dict[str, object]] = []
    begin = time.monotonic()
    run_part(part, small=True, write=rows.append)
    return _result(rows, "ok", begin)


def sanitized(out: Path) -> dict[str, object]:
    """Every kernel once, under compute-sanitizer's memory check."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return _result([], f"{SKIPPED}: no compute-sanitizer on PATH", time.monotonic())
    part = Part("sanitizer", "gpu_check_kernels", "launch_all", SANITIZER_S)
    return in_process_of_its_own(part, out, (tool, "--tool", "memcheck", "--error-exitcode", "9"))


def stack() -> dict[str, object]:
    """The services over loopback, overlap on against off: `stepahead bench overlap`."""
    begin = time.monotonic()
    try:
        importlib.metadata.version("stepahead")
    except importlib.metadata.PackageNotFoundError:
        return _result([], f"{SKIPPED}: stepahead is not installed", begin)
    command = [
        *(sys.executable, "-c", "from stepahead.cli.main import main; main()", "bench", "overlap", "--json"),
        *("--model", "random:llama-8b", "--requests", "256", "--client", "multiplex"),
        *("--rounds", "1", "--prompt", "128", "--output", "64"),
    ]
    # Two workers stand beside each other on the GPU.
    environment = os.environ | {"STEPAHEAD_DEVICE": "cuda", "STEPAHEAD_KV_CACHE_BYTES": "24GiB"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as bench:
        try:
            written, errors = bench.communicate(timeout=STACK_S)
        except subprocess.TimeoutExpired:
            bench.terminate()  # it stops its services; killed, it would leave them behind
            return _result([], f"stopped after {STACK_S} s", begin)
    if bench.returncode:
        return _result([], f"exit code {bench.returncode}: {errors[-1500:]}", begin)
    return _result(json.loads(written)["cells"], "ok", begin)


def _result(rows: list[dict[str, object]], ended: str, begin: float, log: Path | None = None) -> dict[str, object]:
    missing = [row[SKIPPED] for row in rows if SKIPPED in row]
    if ended == "ok" and missing:
        rows, ended = [], f"{SKIPPED}: {missing[0]}"
    if ended == "ok" and any(row.get("ok") is False for row in rows):
        ended = "not as it should be"
    result: dict[str, object] = {"ended": ended, "seconds": round(time.monotonic() - begin, 1), "rows": rows}
    if log is not None and ended != "ok":
        result["log"] = log.read_text(encoding="utf-8", errors="replace")[-3000:]
    return result


def describe_machine(*, small: bool) -> dict[str, object]:
    """What was measured on."""
    machine: dict[str, object] = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    for name in ("torch", "cupy-cuda13x", "numpy"):
        try:
            machine[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            machine[name] = "not installed"
    if small:
        return machine | {"device": "none: a dry run on this CPU"}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        machine["device"] = subprocess.run(
            query, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        machine["device"] = f"unknown: {error}"
    return machine


def markdown(report: dict[str, object]) -> str:
    """Returns the report as tables."""
    lines = ["# GPU check", "", *(f"- {name}: {value}" for name, value in report["machine"].items()), ""]
    for name, part in report["parts"].items():
        lines += [f"## {name}", "", f"{part['ended']}, {part['seconds']} s", ""]
        rows = part["rows"]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        if rows:
            lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
            lines += [f"| {' | '.join(str(row.get(column, '')) for column in columns)} |" for row in rows]
            lines.append("")
        if "log" in part:
            lines += ["```", part["log"], "```", ""]
    return "\n".join(lines)


def check(out: Path, only: list[str], *, small: bool) -> int:
    """Runs the parts and writes the report; returns how many failed."""
    out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, Callable[[], dict[str, object]]] = {}
    for part in PARTS:
        runs[part.name] = lambda part=part: in_this_process(part) if small else in_process_of_its_own(part, out)
    if not small:
        runs |= {"sanitizer": lambda: sanitized(out), "stack": stack}
    report: dict[str, object] = {"machine": describe_machine(small=small), "parts": {}}
    for name, run in runs.items():
        if not only or name in only:
            report["parts"][name] = run()
            # After every part: whatever happens next, this much is kept.
            (out / "gpu-check.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
            (out / "gpu-check.md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))
    endings = [str(part["ended"]) for part in report["parts"].values()]
    return sum(not ended.startswith(("ok", SKIPPED)) for ended in endings)


def main(arguments: list[str] | None = None) -> int:
    """Parses and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "gpu-check")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part is None:
        return check(options.out, options.only, small=options.dry_run)
    sanitizer = Part("sanitizer", "gpu_check_kernels", "launch_all", SANITIZER_S)
    part = next(one for one in (*PARTS, sanitizer) if one.name == options.part)
    with options.rows.open("a", encoding="utf-8", buffering=1) as file:
        run_part(part, small=False, write=lambda row: file.write(json.dumps(row) + "\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
