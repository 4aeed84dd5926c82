"""Every block of docs/python-client.md runs, and prints what stands below it."""

from __future__ import annotations

import asyncio
import io
import re
from functools import partial
from pathlib import Path

import pytest

from stepahead.client import DEFAULT_ADDRESS
from tests.e2e.stack import serve

pytestmark = pytest.mark.e2e

DOCUMENT = Path(__file__).parents[2] / "docs" / "python-client.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
EXAMPLES = BLOCK.findall(DOCUMENT.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("code", "printed"), EXAMPLES, ids=range(len(EXAMPLES)))
async def test_the_documents_examples_run(code: str, printed: str) -> None:
    async with serve("toy:score-table") as stack:
        assert DEFAULT_ADDRESS in code
        output = io.StringIO()
        # Not by replacing stdout: the scheduler in this process logs there too.
        names = {"print": partial(print, file=output)}
        runnable = compile(code.replace(DEFAULT_ADDRESS, stack.server.address), str(DOCUMENT), "exec")
        await asyncio.to_thread(exec, runnable, names)
    assert output.getvalue() == printed


def test_the_document_has_examples() -> None:
    assert len(EXAMPLES) == DOCUMENT.read_text(encoding="utf-8").count("```python") >= 5
