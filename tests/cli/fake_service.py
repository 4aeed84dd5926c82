"""A tiny service for tests of supervision: python fake_service.py ROLE MODE JOURNAL [flags of a real service].

It appends what happens to it to JOURNAL, one line each. Modes: ok; fail (gives up while loading); die (ends
by itself once DIE is in the journal); deaf (never ready, ignores SIGTERM); slow (ready, ignores SIGTERM); drains
(ends with the second SIGTERM); sour (exit code 5 when stopped); fade (fails once FAIL is in the journal); refuse
(a scheduler that takes no worker, and goes on).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

role, mode, journal = sys.argv[1], sys.argv[2], Path(sys.argv[3])
announce_fd = int(sys.argv[sys.argv.index("--announce-fd") + 1])


def note(text: str) -> None:
    with journal.open("a") as file:
        file.write(f"{role} {text}\n")


def announce(**event: object) -> None:
    os.write(announce_fd, json.dumps(event).encode() + b"\n")


def on_term(signal_number: int, frame: object) -> None:
    note("SIGTERM")
    if mode == "drains" and journal.read_text().count(f"{role} SIGTERM") < 2:
        return
    if mode not in ("deaf", "slow"):
        sys.exit(5 if mode == "sour" else 0)


signal.signal(signal.SIGTERM, on_term)
# A terminal's Ctrl-C must not reach a service: it is the parent's to stop services in order.
signal.signal(signal.SIGINT, lambda *_: note("SIGINT"))
note(f"started {os.getpid()} " + " ".join(sys.argv[4:]))
announce(event="listening", address=f"127.0.0.1:{os.getpid()}")
announce(event="progress", what="weights", done=1, total=2)
if mode == "fail" or (mode == "fade" and "FAIL" in journal.read_text()):
    sys.stderr.write("first line of the log\nlast line of the log\n")
    announce(event="failed", message="no such model")
    sys.exit(3)
if mode == "refuse":
    announce(event="refused", worker="127.0.0.1:1", message="max_model_len is odd")
elif mode != "deaf":
    announce(event="something-newer")
    announce(
        event="ready", model="fake", device="cpu", dtype="float32", num_blocks=10, block_size=16,
        kv_groups="10 blocks", num_concurrent=5.25 if "--roomy" in sys.argv else 1.25,
        has_tokenizer="--dumb" not in sys.argv, has_chat_template="--chatty" in sys.argv,
        kv_cache_bytes=4096, max_num_seqs=2, max_model_len=64,
    )  # fmt: skip
while not (mode == "die" and "DIE" in journal.read_text()):
    time.sleep(0.01)
note("dies")
os.kill(os.getpid(), signal.SIGKILL)
