"""What an orchestrator asks of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.errors import ConfigurationError
from worker.health import HealthServer


class Probe:
    def __init__(self) -> None:
        self.ready = False
        self.server = HealthServer(lambda: self.ready)

    async def ask(self, request: bytes) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await writer.wait_closed()
        return answer.decode().splitlines()[0] if answer else ""

    async def get(self, path: str) -> str:
        return await self.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


@pytest.fixture
async def probe() -> AsyncIterator[Probe]:
    made = Probe()
    await made.server.start("127.0.0.1", 0)
    yield made
    await made.server.close()


async def test_live_answers_whether_ready_or_not(probe: Probe) -> None:
    assert await probe.get("/live") == "HTTP/1.1 200 OK"


async def test_ready_follows_the_worker(probe: Probe) -> None:
    assert await probe.get("/ready") == "HTTP/1.1 503 Service Unavailable"
    probe.ready = True
    assert await probe.get("/ready") == "HTTP/1.1 200 OK"


@pytest.mark.parametrize("request_", [b"GET / HTTP/1.1\r\n\r\n", b"POST /live HTTP/1.1\r\n\r\n", b"\r\n\r\n"])
async def test_other_questions_are_not_found(probe: Probe, request_: bytes) -> None:
    assert await probe.ask(request_) == "HTTP/1.1 404 Not Found"


async def test_a_request_without_an_end_gets_no_answer_and_harms_nobody(probe: Probe) -> None:
    assert await probe.ask(b"GET /live" + b"x" * 20_000) == ""
    assert await probe.get("/live") == "HTTP/1.1 200 OK"


async def test_a_port_that_is_taken_is_said_in_one_line(probe: Probe) -> None:
    with pytest.raises(ConfigurationError, match="TURNKEEPER_HEALTH_PORT"):
        await HealthServer(lambda: True).start("127.0.0.1", probe.server.port)
