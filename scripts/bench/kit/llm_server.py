"""A scripted OpenAI-compatible server: streams what a test tells it to, and refuses what strict providers refuse.

Runs on a thread with a loop of its own, on the loopback interface. ``python -m scripts.bench.kit.llm_server`` serves
one answer for ever, for measurements: its address is the first line on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Self

from scripts.bench.kit.llm_history import violations

MODEL = "test-model"
DONE = "data: [DONE]\n\n"


class Gate:
    """Holds a reply back until the test opens it."""

    def __init__(self) -> None:
        self._reached: Future[None] = Future()
        self._open: Future[None] = Future()

    async def reached(self, timeout_seconds: float = 10) -> None:
        """Wait until a reply stands before the gate."""
        await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._reached)), timeout_seconds)

    def open(self) -> None:
        if not self._open.done():
            self._open.set_result(None)

    async def passed(self) -> None:
        if not self._reached.done():
            self._reached.set_result(None)
        await asyncio.shield(asyncio.wrap_future(self._open))


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. ``arguments``: an object, or the text as the model would send it."""

    name: str
    arguments: dict[str, Any] | str = field(default_factory=dict)
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server answers: text, calls, or an error; whole, late, cut or malformed."""

    text: str = ""
    calls: Sequence[Call] = ()
    reasoning: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 100
    completion_tokens: int = 20
    cached_tokens: int = 0
    message: dict[str, Any] = field(default_factory=dict)  # more keys of the first delta
    deltas: Sequence[dict[str, Any]] | None = None  # in place of those made from the fields above
    raw: Sequence[str] | None = None  # the whole body, piece by piece
    piece: int = 12  # characters of text in one chunk
    delay_seconds: float = 0.0  # before the first chunk
    pause_seconds: float = 0.0  # before each further one
    gate: Gate | None = None  # before the chunk number gate_at
    gate_at: int = 0
    cut_after: int | None = None  # chunks, then the body ends
    drop: bool = False  # the cut is a lost connection
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    error: dict[str, Any] | None = None


def error(status: int, message: str = "scripted error", *, code: str | None = None, **headers: str) -> Reply:
    """A refusal in OpenAI's shape. Headers are written with underscores: ``retry_after="2"``."""
    body = {"message": message, "type": "error", "param": None, "code": code}
    return Reply(status=status, error=body, headers={k.replace("_", "-"): v for k, v in headers.items()})


@dataclass(slots=True)
class Request:
    """A request as it came. ``closed`` completes when the client hangs up before the answer is whole."""

    body: dict[str, Any]
    headers: dict[str, str]
    closed: Future[None] = field(default_factory=Future)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return list(self.body["messages"])


Script = Callable[[Request], Reply]


class LlmServer:
    """See the module. Use as a context manager; ``script`` says what comes next."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.violations: list[str] = []
        self.url = ""
        self._queue: deque[Reply] = deque()
        self._function: Script | None = None
        self._ids = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llm-server", daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """What points the product, or a process of it, here."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "OPENAI_API_KEY": "sk-test",
            "TURNKEEPER_MODEL": f"openai/{MODEL}",
        }

    def script(self, replies: Iterable[Reply | str] | Script) -> None:
        """The next replies, in order, behind those still waiting; or a function of the request, from now on."""
        if callable(replies):
            self._function = replies
        else:
            self._queue.extend(Reply(reply) if isinstance(reply, str) else reply for reply in replies)

    @property
    def unused(self) -> int:
        """Scripted replies that nobody asked for."""
        return len(self._queue)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=4096)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one client, one after the other, until it hangs up or is hung up on."""
        try:
            while (request := await _read(reader)) is not None:
                if not await self._answer(request, reader, writer):
                    break
        except (ConnectionError, asyncio.CancelledError):  # the client hung up, or the server stops
            pass
        finally:
            writer.close()

    async def _answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer; whether the connection may be used again."""
        reply = self._next(request)
        if reply.error is not None or not request.body.get("stream"):
            document = {"error": reply.error} if reply.error is not None else self._completion(reply)
            await asyncio.sleep(reply.delay_seconds)
            _write(writer, reply.status, {"content-type": "application/json", **reply.headers}, json.dumps(document))
            await writer.drain()
            return True
        watch = asyncio.create_task(reader.read(1))  # nothing comes before the answer is whole, except the end
        streaming = asyncio.create_task(self._stream(request, reply, writer))
        await asyncio.wait((watch, streaming), return_when=asyncio.FIRST_COMPLETED)
        whole = streaming.done()
        for task in (watch, streaming):
            task.cancel()
        await asyncio.wait((watch, streaming))
        if not whole or streaming.exception() is not None:
            request.closed.set_result(None)
            return False
        return streaming.result()

    def _next(self, request: Request) -> Reply:
        self.requests.append(request)
        broken = list(violations(request.body))
        if broken:
            self.violations += broken
            return error(400, "; ".join(broken), code="invalid_request_error")
        if self._function is not None:
            return self._function(request)
        if not self._queue:
            self.violations.append("a request without a scripted reply")
            return error(400, "no reply is scripted for this request")
        return self._queue.popleft()

    async def _stream(self, request: Request, reply: Reply, writer: asyncio.StreamWriter) -> bool:
        _write(writer, 200, {"content-type": "text/event-stream", **reply.headers}, None)
        sent = 0
        async for piece in self._pieces(request, reply):
            writer.write(f"{len(piece.encode()):x}\r\n{piece}\r\n".encode())
            await writer.drain()
            sent += 1
            if sent == reply.cut_after:
                break
        if reply.drop:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _pieces(self, request: Request, reply: Reply) -> AsyncIterator[str]:
        pieces = reply.raw if reply.raw is not None else self._events(request, reply)
        await asyncio.sleep(reply.delay_seconds)
        for number, piece in enumerate(pieces):
            if reply.gate is not None and number == reply.gate_at:
                await reply.gate.passed()
            if number and reply.pause_seconds:
                await asyncio.sleep(reply.pause_seconds)
            yield piece

    def _events(self, request: Request, reply: Reply) -> Iterable[str]:
        frame = {"id": f"chatcmpl-{next(self._ids)}", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
        for delta in self._deltas(reply):
            yield _event({**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield _event({**frame, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(reply)}]})
        if (request.body.get("stream_options") or {}).get("include_usage"):
            yield _event({**frame, "choices": [], "usage": _usage(reply)})
        yield DONE

    def _deltas(self, reply: Reply) -> Iterable[dict[str, Any]]:
        if reply.deltas is not None:
            yield from reply.deltas
            return
        yield {"role": "assistant", "content": "", **reply.message}
        for start in range(0, len(reply.reasoning), reply.piece):
            yield {"reasoning_content": reply.reasoning[start : start + reply.piece]}
        for start in range(0, len(reply.text), reply.piece):
            yield {"content": reply.text[start : start + reply.piece]}
        for index, call in enumerate(self._calls(reply)):
            function, arguments = call["function"], call["function"]["arguments"]
            yield {"tool_calls": [{**call, "index": index, "function": {**function, "arguments": ""}}]}
            for start in range(0, len(arguments), reply.piece):
                fragment = arguments[start : start + reply.piece]
                yield {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}

    def _calls(self, reply: Reply) -> Iterable[dict[str, Any]]:
        for call in reply.calls:
            arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
            identifier = call.id or f"call_{next(self._ids)}"
            yield {"id": identifier, "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _completion(self, reply: Reply) -> dict[str, Any]:
        message = {"role": "assistant", "content": reply.text or None, **reply.message}
        if calls := list(self._calls(reply)):
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "finish_reason": _finish(reply)}
        frame = {"id": f"chatcmpl-{next(self._ids)}", "object": "chat.completion", "created": 1, "model": MODEL}
        return {**frame, "choices": [choice], "usage": _usage(reply)}


def _finish(reply: Reply) -> str:
    return reply.finish_reason or ("tool_calls" if reply.calls else "stop")


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


async def _read(reader: asyncio.StreamReader) -> Request | None:
    """The next request; None at the end of the connection."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    lines = head.split("\r\n")[1:]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
    return Request(json.loads(await reader.readexactly(int(headers["content-length"]))), headers)


def _write(writer: asyncio.StreamWriter, status: int, headers: dict[str, str], body: str | None) -> None:
    length = {"transfer-encoding": "chunked"} if body is None else {"content-length": str(len(body.encode()))}
    head = "".join(f"{name}: {value}\r\n" for name, value in {**headers, **length}.items())
    writer.write(f"HTTP/1.1 {status} Scripted\r\n{head}\r\n{body or ''}".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", default="All is well.")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before the first chunk")
    options = parser.parse_args()
    reply = replace(Reply(options.text), delay_seconds=options.delay)
    with LlmServer() as server:
        server.script(lambda request: reply)
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
