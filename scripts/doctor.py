"""``turnkeeper doctor``: looks at everything that a worker depends on, one line each, with what to do.

A check answers with a ``Finding``; one that cannot be made because something else is missing says so. Exit status 1
if anything fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from scripts.dead_letters import can_be_sent_again
from scripts.desk import guarded
from scripts.render import Output, counted, print_json
from scripts.workers import alive_workers
from shared.errors import SchemaOutdated, TurnkeeperError
from shared.log import configure_logging
from shared.queues import connect_async, queue_depths, redis_errors
from shared.settings import Settings, load_settings
from shared.store import open_store
from shared.store.base import Store

if TYPE_CHECKING:
    from redis.asyncio import Redis

Status = Literal["ok", "warn", "fail"]

_SKEW_WARN_SECONDS = 1.0
_COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}
_UP = "Start it with: turnkeeper up"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check came to. ``hint``: what to do about it."""

    check: str
    status: Status
    detail: str
    hint: str = ""

    def as_row(self) -> dict[str, str]:
        return {"check": self.check, "status": self.status, "detail": self.detail, "hint": self.hint}


@dataclass(slots=True)
class Patient:
    """What the checks look at. ``redis`` and ``store`` are None where they could not be reached; ``offsets`` holds
    each clock's seconds ahead of ours."""

    settings: Settings
    redis: Redis | None = None
    store: Store | None = None
    offsets: dict[str, float] = field(default_factory=dict)


Check = Callable[[Patient], Awaitable[list[Finding]]]


def doctor(as_json: bool) -> int:
    """Run every check and show its findings; the exit status."""
    configure_logging("error")
    return guarded(lambda: asyncio.run(_doctor(Patient(load_settings()), Output(as_json))), as_json)


async def _doctor(patient: Patient, out: Output) -> int:
    failed = False
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, patient)
        for check in CHECKS:
            for finding in await _findings(check, patient):
                failed = failed or finding.status == "fail"
                _show(finding, out)
    return 1 if failed else 0


async def _close(patient: Patient) -> None:
    if patient.redis is not None:
        await patient.redis.aclose()
    if patient.store is not None:
        await patient.store.close()


async def _findings(check: Check, patient: Patient) -> list[Finding]:
    name = getattr(check, "__name__", "check").removeprefix("_").replace("_", " ")
    try:
        return await check(patient)
    except TurnkeeperError as error:
        return [Finding(name, "fail", error.description, error.hint)]


def _show(finding: Finding, out: Output) -> None:
    if out.as_json:
        print_json(finding.as_row())
        return
    from rich.text import Text

    line = Text.assemble((f"{finding.status:<5}", _COLOURS[finding.status]), f"{finding.check:<12} {finding.detail}")
    out.console.print(line, soft_wrap=True)
    if finding.hint and finding.status != "ok":
        out.note(f"{'':<18}{finding.hint}", "dim")


async def _redis(patient: Patient) -> list[Finding]:
    settings = patient.settings
    client = connect_async(settings.effective_redis_url)
    try:
        with redis_errors("saying hello"):
            info = await client.info()
    except TurnkeeperError as error:
        await client.aclose()
        hint = _UP if settings.embedded_redis else error.hint
        detail = "the embedded Redis is not running" if settings.embedded_redis else error.description
        return [Finding("redis", "fail", detail, hint)]
    patient.redis = client
    patient.offsets["redis"] = await _redis_offset(client)
    return [_redis_version(info, settings), _persistence(info), _eviction(info)]


async def _redis_offset(client: Redis) -> float:
    with redis_errors("telling the time"):
        sent = time.time()
        seconds, microseconds = await client.time()
        return float(seconds) + float(microseconds) / 1e6 - (sent + time.time()) / 2


def _redis_version(info: dict[str, Any], settings: Settings) -> Finding:
    name = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    version = str(info.get("valkey_version") or info.get("redis_version"))
    where = "embedded, " + str(settings.socket_path) if settings.embedded_redis else "REDIS_URL"
    if tuple(int(part) for part in str(info["redis_version"]).split(".")[:2]) < (6, 2):
        return Finding("redis", "fail", f"{name} {version}", "RQ's workers need Redis 6.2 or newer.")
    return Finding("redis", "ok", f"{name} {version} ({where})")


def _persistence(info: dict[str, Any]) -> Finding:
    if info.get("aof_enabled"):
        return Finding("persistence", "ok", "append-only file on")
    hint = "After a restart of Redis, turns are rung again by the reaper, late. Set appendonly yes."
    return Finding("persistence", "warn", "no append-only file", hint)


def _eviction(info: dict[str, Any]) -> Finding:
    policy = str(info.get("maxmemory_policy", "unknown"))
    if policy == "noeviction":
        return Finding("eviction", "ok", policy)
    hint = "Redis may drop queues and jobs when memory is short. Set maxmemory-policy noeviction."
    return Finding("eviction", "warn", policy, hint)


async def _store(patient: Patient) -> list[Finding]:
    settings = patient.settings
    if settings.store_kind == "sqlite" and not settings.sqlite_path.exists():
        hint = "turnkeeper up makes it, and so does the first question."
        return [Finding("store", "warn", f"there is no {settings.sqlite_path} yet", hint)]
    store = open_store(settings)
    try:
        await store.open()
        health = await store.health()
    except SchemaOutdated as error:
        await store.close()
        hint = error.hint or "Bring it up to date with: turnkeeper migrate"
        return [Finding("store", "fail", error.description, hint)]
    except TurnkeeperError:
        await store.close()
        raise
    patient.store = store
    sent = time.time()
    now = datetime.fromisoformat((await store.health())["now"])
    patient.offsets["store"] = now.timestamp() - (sent + time.time()) / 2
    where = f" ({settings.sqlite_path})" if settings.store_kind == "sqlite" else ""
    schema = f"schema {health['schema_version']}, readable from {health['min_compatible']}"
    return [
        Finding("store", "ok", f"{health['kind']}{where}, {schema}"),
        Finding("turns", "ok", f"{health['pending']} pending, {health['running']} running"),
    ]


async def _clock(patient: Patient) -> list[Finding]:
    if not patient.offsets:
        return [Finding("clock", "warn", "not compared: neither Redis nor the store answers")]
    shown = ", ".join(f"{name} {offset:+.3f} s" for name, offset in patient.offsets.items())
    worst = max(abs(a - b) for a in (0.0, *patient.offsets.values()) for b in (0.0, *patient.offsets.values()))
    if worst <= _SKEW_WARN_SECONDS:
        return [Finding("clock", "ok", f"against here: {shown}")]
    status: Status = "fail" if worst > patient.settings.lease_seconds else "warn"
    return [Finding("clock", status, f"against here: {shown}", "Synchronise the clocks of these machines (NTP).")]


async def _model(patient: Patient) -> list[Finding]:
    model = patient.settings.model
    if not model:
        hint = "Set TURNKEEPER_MODEL to a litellm name; until then every request has to name a model."
        return [Finding("model", "warn", "none set", hint)]
    from worker.agent.model import doubtful_key, missing_variables

    missing = await asyncio.to_thread(missing_variables, model)
    if not missing and (doubt := await asyncio.to_thread(doubtful_key, model)):
        return [Finding("model", "fail", f"{model}: {doubt}", "Set the real one here and for every worker.")]
    if not missing:
        return [Finding("model", "ok", f"{model}: nothing is missing")]
    names = ", ".join(missing)
    if any(name.endswith("_API_KEY") for name in missing):
        return [Finding("model", "fail", f"{model}: not set: {names}", "Set it here and for every worker.")]
    hint = "Needed unless there is a default or the machine's role stands in for it."
    return [Finding("model", "warn", f"{model}: not set: {names}", hint)]


async def _tools(patient: Patient) -> list[Finding]:
    from worker.agent.tools import load_toolbox

    toolbox = await load_toolbox(patient.settings).open()
    try:
        specs, problems = toolbox.specs(), toolbox.problems()
    finally:
        await toolbox.close()
    gated = sum(1 for spec in specs if spec.approval != "never")
    where = f"from {patient.settings.tools}" if patient.settings.tools else "built in; TURNKEEPER_TOOLS is not set"
    found = [Finding("tools", "ok", f"{counted(len(specs), 'tool')}, {gated} of them may need approval, {where}")]
    hint = "Workers connect again by themselves; until then these tools are missing."
    return found + [Finding("tools", "fail", problem, hint) for problem in problems]


async def _workers(patient: Patient) -> list[Finding]:
    if patient.redis is None:
        return [Finding("workers", "warn", "unknown: Redis does not answer")]
    workers = [worker for worker in await alive_workers(patient.redis) if not worker.gone]
    depths = await queue_depths(patient.redis, patient.settings.slots)
    findings = []
    if not workers:
        hint = _UP if patient.settings.embedded_redis else "Start one with: turnkeeper worker"
        findings.append(Finding("workers", "warn", "none", hint))
    for worker in workers:
        findings.append(Finding("workers", "ok", f"{worker.name} {worker.state} on {', '.join(worker.queues)}"))
    for queue, depth in depths.items():
        served = any(worker.serves(queue) for worker in workers)
        status: Status = "warn" if depth and not served else "ok"
        slots = patient.settings.slots[queue]
        hint = ""
        if status == "warn":
            start = f"turnkeeper worker --queue {queue}={slots}" if workers else _UP.rpartition(": ")[2]
            hint = f"No worker takes from it: {start}"
        findings.append(Finding("queue", status, f"{queue}: {depth} waiting, {counted(slots, 'slot')} a worker", hint))
    return findings


async def _dead_letters(patient: Patient) -> list[Finding]:
    if patient.store is None:
        return [Finding("dead letters", "warn", "unknown: the store does not answer")]
    letters = await patient.store.dead_letters()
    if not letters:
        return [Finding("dead letters", "ok", "none")]
    return [
        Finding(
            "dead letter",
            "warn",
            f"{letter['letter_id']}: {letter['function'] or 'unknown job'}: {letter['code']}: {letter['description']}",
            f"turnkeeper requeue {letter['letter_id']}{'' if can_be_sent_again(letter) else ' --discard'}",
        )
        for letter in letters
    ]


CHECKS: tuple[Check, ...] = (_redis, _store, _clock, _model, _tools, _workers, _dead_letters)
