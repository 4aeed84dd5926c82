"""The Node client of client/node against the real services. Skipped, visibly, where npm is missing."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepahead.cli.stack import StackOptions
from stepahead.worker.model.bundle import BundleFields, write_bundle
from stepahead.worker.runner import Runner
from stepahead.worker.toy.lessons import END, START, WORDS, score_table_bundle
from tests.e2e.lab_stack import serve_lab, unchanged
from tests.e2e.stack import BOUND_S, Stack

pytestmark = pytest.mark.e2e

NODE_CLIENT = Path(__file__).resolve().parents[2] / "client" / "node"
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def installed() -> None:
    """The client's dependencies, exactly as locked; installed again only when the lock has changed."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed: the Node client is not tested")
    marker = NODE_CLIENT / "node_modules" / ".installed-lock.json"
    lock = (NODE_CLIENT / "package-lock.json").read_text()
    if marker.is_file() and marker.read_text() == lock:
        return
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    result = subprocess.run(command, cwd=NODE_CLIENT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    marker.write_text(lock)


def chatty(runner: Any) -> Runner:
    """The score table with a chat template: a conversation is its words in a row."""
    fields = BundleFields(
        bos_token=WORDS[START],
        eos_token=WORDS[END],
        bos_token_id=START,
        eos_token_ids=(END,),
        generation_defaults={"temperature": 0.0},
    )
    tokenizer = json.dumps(json.loads(read_member(score_table_bundle(), "tokenizer.json")))
    runner.facts = replace(runner.facts, tokenizer_bundle=write_bundle(tokenizer, fields, TEMPLATE))
    return runner


def read_member(bundle: bytes, name: str) -> str:
    import io
    import zipfile

    return zipfile.ZipFile(io.BytesIO(bundle)).read(name).decode()


@asynccontextmanager
async def serve(model: str, change: Any = unchanged) -> AsyncIterator[Stack]:
    async with serve_lab(StackOptions(model=model), change) as stack:
        yield stack


async def node(stack: Stack, *arguments: str, stdin: str = "") -> str:
    """The output of `node ARGUMENTS` with the server's address as the second argument."""
    command = ["node", arguments[0], stack.server.address, *arguments[1:]]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=NODE_CLIENT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(stdin.encode()), BOUND_S)
    assert (process.returncode, stderr.decode()) == (0, "")
    return stdout.decode()


@pytest.mark.usefixtures("installed")
async def test_a_completion_is_streamed() -> None:
    async with serve("toy:score-table") as stack:
        assert await node(stack, "examples/generate.js", "<start>") == "Small steps help\n[STOP, 4 tokens]\n"
        assert await node(stack, "examples/generate.js", "<start>", "2") == "Small steps\n[LENGTH, 2 tokens]\n"
        await stack.assert_quiescent()


@pytest.mark.usefixtures("installed")
async def test_a_conversation_keeps_its_turns() -> None:
    """The second prompt holds the first answer: its last word decides."""
    async with serve("toy:score-table", chatty) as stack:
        output = await node(stack, "examples/chat.js", stdin="Small\nsteps\n")
        assert [line.strip() for line in output.splitlines()] == ["steps help", "help"]
        status = await stack.status()
        assert status.totals.prefill_tokens == 1 + 4


@pytest.mark.usefixtures("installed")
async def test_requests_are_cancelled_from_the_stream_and_by_id() -> None:
    """F6: the server gives everything back."""
    async with serve("toy:sleep?ms=2") as stack:
        assert (await node(stack, "examples/cancel.js")).splitlines() == [
            "by stream: CANCELLED after three tokens or more",
            "by id: CANCELLED,NOT_FOUND",
            "by id: CANCELLED after three tokens or more",
        ]
        await stack.assert_quiescent()
        assert (await stack.status()).totals.requests_cancelled == 2


@pytest.mark.usefixtures("installed")
async def test_status_details_are_decoded() -> None:
    async with serve("toy:score-table") as stack:
        lines = (await node(stack, "examples/errors.js")).splitlines()
    assert lines[0].split() == ["INVALID_ARGUMENT", "INVALID_REQUEST"]
    fields = [line.strip().partition(":")[0] for line in lines[1:]]
    assert sorted(fields) == ["sampling.top_p", "stopping.max_tokens"]


def test_the_lock_names_no_registry() -> None:
    """Whoever installs it uses the registry that npm is configured for."""
    lock = json.loads((NODE_CLIENT / "package-lock.json").read_text())
    wanted = json.loads((NODE_CLIENT / "package.json").read_text())["dependencies"]
    assert lock["packages"][""]["dependencies"] == wanted
    packages = {name: facts for name, facts in lock["packages"].items() if name}
    assert packages
    for name, facts in packages.items():
        assert "resolved" not in facts, name
        assert facts["integrity"].startswith("sha512-"), name
