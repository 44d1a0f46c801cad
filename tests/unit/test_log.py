"""Log lines: JSON, bound context, nothing secret, no conversation's text."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from shared.errors import ConfigurationError, LeaseLost, QueueUnavailable, StoreUnavailable, TurnkeeperError
from shared.log import bind, bound, configure_logging, exit_on_error, get_logger, unbind_all


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    unbind_all()


@pytest.fixture
def lines() -> io.StringIO:
    stream = io.StringIO()
    configure_logging("info", stream=stream)
    return stream


def read(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_bound_context_is_in_every_line_of_its_task(lines: io.StringIO) -> None:
    log = get_logger("worker.turn")

    async def turn(number: int) -> None:
        bind(turn=number)
        await asyncio.sleep(0)
        with bound(attempt=2):
            log.info("claimed", seconds=1.5)
        log.info("ended")

    bind(worker="w")
    await asyncio.gather(*(asyncio.create_task(turn(n)) for n in (1, 2)))
    got = read(lines)
    assert all(line["worker"] == "w" for line in got)
    assert [(li["event"], li["turn"], li.get("attempt")) for li in sorted(got, key=lambda li: li["turn"])] == [
        ("claimed", 1, 2), ("ended", 1, None), ("claimed", 2, 2), ("ended", 2, None),
    ]  # fmt: skip
    assert got[0].keys() >= {"timestamp", "level", "logger", "seconds"}


def test_secrets_and_texts_are_masked(lines: io.StringIO) -> None:
    get_logger("shared.store").info(
        "connected",
        url="redis://user:hunter2@host/0",
        supabase_key="hunter2",
        api_key="hunter2",
        approval_token="hunter2",
        headers={"Authorization": "Bearer hunter2", "Accept": "json"},
        messages=[{"role": "user", "content": "my text"}],
        ask="my text",
        tool={"arguments": {"command": "my text"}, "name": "shell"},
        prompt_tokens=7,
        password=None,
    )
    assert "hunter2" not in lines.getvalue()
    assert "my text" not in lines.getvalue()
    [line] = read(lines)
    assert line["url"] == "redis://user:***@host/0"
    assert line["headers"] == {"Authorization": "***", "Accept": "json"}
    assert line["tool"] == {"arguments": "***", "name": "shell"}
    assert (line["prompt_tokens"], line["password"]) == (7, None)


def test_at_debug_texts_are_there_and_secrets_are_not() -> None:
    stream = io.StringIO()
    configure_logging("debug", stream=stream)
    get_logger("worker").debug("asked", ask="my text", api_key="hunter2")
    [line] = read(stream)
    assert (line["ask"], line["api_key"]) == ("my text", "***")


def test_libraries_are_heard_from_warning_on(lines: io.StringIO) -> None:
    for name in ("rq.worker", "uvicorn", "aiohttp", "some.library"):  # not those that litellm filters
        logging.getLogger(name).info("chatter")
        logging.getLogger(name).warning("trouble at %s", "rediss://:hunter2@host")
    got = read(lines)
    assert [line["event"] for line in got] == ["trouble at rediss://:***@host"] * 4
    assert got[0]["logger"] == "rq.worker"


def test_tracebacks_and_odd_values_stay_one_line(lines: io.StringIO) -> None:
    log = get_logger("worker")
    try:
        raise ValueError("no\nway")
    except ValueError:
        log.exception("failed", odd=object(), nan=float("nan"), surrogate="\ud800", number=2**70)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("beware", UserWarning, stacklevel=1)
    failed, warned = read(lines)
    assert "ValueError: no\nway" in failed["exception"]
    assert failed["nan"] is None
    assert "beware" in warned["event"]


def test_text_for_people() -> None:
    stream = io.StringIO()
    configure_logging("info", json=False, stream=stream)
    get_logger("scripts").info("ready", port=1)
    assert "ready" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigurationError("No."), 2), (StoreUnavailable("No."), 3), (QueueUnavailable("No."), 3), (LeaseLost("No."), 2)],
)
def test_an_error_of_ours_ends_a_process_with_one_line(
    error: TurnkeeperError, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info, exit_on_error():
        raise error
    assert exit_info.value.code == status
    assert capsys.readouterr().err == "turnkeeper: No.\n"


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(KeyError), exit_on_error():
        raise KeyError("bug")
