"""Compiling off the loop, within limits: rule I6."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop

from stepahead.scheduler.constraints.compiler import CompilerLimits, ConstraintCompiler
from stepahead.scheduler.constraints.errors import ConstraintBusy, ConstraintInvalid, ConstraintUnavailable
from stepahead.scheduler.constraints.sandbox_process import SandboxLimits
from stepahead.scheduler.constraints.spec import ConstraintKind, ConstraintSpec
from tests.scheduler.constraints.builders import TABLE, schema_spec

SMALL = schema_spec({"type": "integer"})
# References 2,000 deep: the engine follows them on its stack.
DEEP = schema_spec(
    {"$ref": "#/$defs/0"}
    | {"$defs": {str(i): {"properties": {"x": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(2000)} | {"2000": {}}}
)


@pytest_asyncio.fixture
async def compiler() -> AsyncIterator[ConstraintCompiler]:
    made = ConstraintCompiler(lambda: TABLE)
    yield made
    await made.close()


def other(number: int) -> ConstraintSpec:
    return schema_spec({"const": number})


def address_space_bytes(pid: int) -> int:
    """What RLIMIT_AS counts."""
    statm = Path(f"/proc/{pid}/statm")
    if not statm.exists():
        pytest.skip("address space is limited on Linux only")
    return int(statm.read_text().split()[0]) * resource.getpagesize()


async def test_results_are_kept_and_matchers_are_independent(compiler: ConstraintCompiler):
    first = await compiler.compile(SMALL)
    assert await compiler.compile(schema_spec({"type": "integer"})) is first
    assert first.cost_bytes > 0
    one, two = first.matcher(), first.matcher()
    before = two.mask()
    one.replay([TABLE.pieces.index(b"1")])
    assert two.mask() == before != one.mask()


async def test_i6_refusals_name_field_and_place_and_are_remembered(compiler: ConstraintCompiler):
    for _ in range(2):
        with pytest.raises(ConstraintInvalid) as caught:
            await compiler.compile(schema_spec({"items": {"uniqueItems": True}}))
        assert caught.value.field == "constraint.json_schema"
        assert caught.value.description == "/items/uniqueItems: keyword not supported"
    for regex, reason in (("(", "unclosed group"), (r"a(?=b)", "look-around, .* is not supported")):
        with pytest.raises(ConstraintInvalid, match=rf"^constraint.regex: [^\n]*: {reason}$"):
            await compiler.compile(ConstraintSpec(ConstraintKind.REGEX, (regex,)))
    with pytest.raises(ConstraintInvalid, match=r"^constraint.grammar: "):
        await compiler.compile(ConstraintSpec(ConstraintKind.GRAMMAR, ("start: nowhere",)))


async def test_i6_a_process_that_dies_costs_a_refusal_and_is_replaced(compiler: ConstraintCompiler):
    await compiler.compile(SMALL)
    [pid] = compiler.sandbox_pids
    with pytest.raises(ConstraintInvalid, match="too complex"):
        await compiler.compile(DEEP)
    await compiler.compile(other(1))
    [new_pid] = compiler.sandbox_pids
    assert new_pid != pid
    # Killed from outside while it is idle: that says nothing about the next constraint.
    os.kill(new_pid, signal.SIGKILL)
    await compiler.compile(other(2))
    await compiler.compile(other(3))


def test_i6_the_loop_of_the_service_sees_a_death_as_well():
    """uvloop says it in its own words. A process that dies as it starts is started once more."""

    async def kill_and_compile() -> None:
        compiler = ConstraintCompiler(lambda: TABLE)
        try:
            await compiler.compile(SMALL)
            for number in range(3):
                os.kill(compiler.sandbox_pids[0], signal.SIGKILL)
                await asyncio.sleep(0.01 * number)
                await compiler.compile(other(number))
        finally:
            await compiler.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(kill_and_compile())


async def test_i6_a_late_compile_is_killed_and_others_go_on():
    compiler = ConstraintCompiler(lambda: TABLE, CompilerLimits(sandbox=SandboxLimits(compile_s=1.5)))
    await compiler.compile(SMALL)
    [pid] = compiler.sandbox_pids
    # A compile that never ends, whatever the machine.
    os.kill(pid, signal.SIGSTOP)
    late = asyncio.create_task(compiler.compile(other(1)))
    await asyncio.sleep(0)
    assert await compiler.compile(other(2))
    assert not late.done()
    with pytest.raises(ConstraintInvalid, match=r"not compiled within 1.5 s"):
        await late
    assert pid not in compiler.sandbox_pids
    assert await compiler.compile(other(3))
    await compiler.close()


async def test_i6_memory_is_limited(compiler: ConstraintCompiler):
    await compiler.compile(SMALL)
    used_bytes = address_space_bytes(compiler.sandbox_pids[0])
    # Every rule reaches every other: 40 MB, which is well within the default limit.
    rules = "\n".join(f"r{i}: " + " | ".join(f'"{j}" r{j}' for j in range(140)) for i in range(140))
    large = ConstraintSpec(ConstraintKind.GRAMMAR, (f"start: r0\n{rules}",))
    assert (await compiler.compile(large)).cost_bytes > 20 * 2**20
    limits = CompilerLimits(sandbox=SandboxLimits(memory_bytes=used_bytes + 15 * 2**20))
    tight = ConstraintCompiler(lambda: TABLE, limits)
    with pytest.raises(ConstraintInvalid, match="MiB needed"):
        await tight.compile(large)
    assert await tight.compile(SMALL)
    await tight.close()


async def test_callers_share_a_compile_and_cancelling_one_leaves_it_to_the_others(compiler: ConstraintCompiler):
    callers = [asyncio.create_task(compiler.compile(SMALL)) for _ in range(3)]
    await asyncio.sleep(0)
    callers[0].cancel()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1] is results[2]
    assert not isinstance(results[1], BaseException)


async def test_the_cache_keeps_the_newest_within_its_bounds():
    compiler = ConstraintCompiler(lambda: TABLE, CompilerLimits(max_entries=2))
    first = await compiler.compile(other(1))
    second = await compiler.compile(other(2))
    assert await compiler.compile(other(1)) is first
    await compiler.compile(other(3))
    assert await compiler.compile(other(1)) is first
    assert await compiler.compile(other(2)) is not second
    await compiler.close()


async def test_the_cache_is_bounded_in_bytes():
    compiler = ConstraintCompiler(lambda: TABLE, CompilerLimits(max_cached_bytes=1))
    first = await compiler.compile(other(1))
    assert await compiler.compile(other(1)) is first
    await compiler.compile(other(2))
    assert await compiler.compile(other(1)) is not first
    await compiler.close()


async def test_too_many_at_a_time_are_turned_away():
    compiler = ConstraintCompiler(lambda: TABLE, CompilerLimits(max_pending=2))
    callers = [asyncio.create_task(compiler.compile(other(number))) for number in range(3)]
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert [isinstance(result, ConstraintBusy) for result in results] == [False, False, True]
    await compiler.close()


async def test_closing_ends_what_is_under_way():
    compiler = ConstraintCompiler(lambda: TABLE)
    caller = asyncio.create_task(compiler.compile(SMALL))
    await asyncio.sleep(0)
    await compiler.close()
    with pytest.raises(ConstraintUnavailable):
        await caller
    with pytest.raises(ConstraintUnavailable):
        await compiler.compile(SMALL)
    assert compiler.sandbox_pids == []


async def test_a_table_that_cannot_be_read_is_reported_every_time():
    def fail() -> object:
        raise ConstraintUnavailable("no end-of-text id")

    compiler = ConstraintCompiler(fail)
    for _ in range(2):
        with pytest.raises(ConstraintUnavailable, match="no end-of-text id"):
            await compiler.compile(SMALL)
    await compiler.close()
