"""MCP servers written with the SDK's server side, over stdio and streamable HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.settings import load_settings
from tests.support.tools import MemoryArtifacts, tool_context, until
from worker.agent.base import ToolResult
from worker.agent.tools import ToolRegistry, load_toolbox

SERVER = Path(__file__).parents[2] / "support" / "mcp_server.py"
PATIENCE_SECONDS = 15


@asynccontextmanager
async def opened(folder: Path, yaml: str) -> AsyncIterator[ToolRegistry]:
    path = folder / "tools.yaml"
    path.write_text(yaml)
    registry = load_toolbox(load_settings(tools=path))
    try:
        yield await registry.open()
    finally:
        await registry.close()


def stdio(folder: Path, more: str = "") -> str:
    return f"""
mcp_servers:
  test:
    command: {sys.executable}
    args: [{SERVER}, stdio]
    env: {{MCP_TEST_FOLDER: {folder}, API_TOKEN: "${{TEST_SECRET}}"}}
{more}"""


def runs(folder: Path) -> list[str]:
    return (folder / "runs").read_text().split() if (folder / "runs").exists() else []


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SECRET", "s3cret")
    monkeypatch.setenv("OPENAI_API_KEY", "must-not-leak")
    monkeypatch.setenv("DATABASE_URL_FOR_TEST", "must-not-leak")


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class HttpServer:
    """The test server as a process that can be killed and started again on the same port."""

    def __init__(self, folder: Path, port: int, *, legacy: bool) -> None:
        self.folder, self.port, self.legacy = folder, port, legacy
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, str(SERVER), "http", str(self.port), *(["legacy"] if self.legacy else [])]
        environment = {**os.environ, "MCP_TEST_FOLDER": str(self.folder)}
        self.process = subprocess.Popen(argv, env=environment)
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("the test server did not start")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def yaml(self) -> str:
        return f"mcp_servers:\n  test:\n    url: http://127.0.0.1:{self.port}/mcp\n    headers: {{X-Key: ok}}\n"


@pytest.fixture(params=["modern", "legacy"])
def http(request: pytest.FixtureRequest, tmp_path: Path, port: int) -> Iterator[HttpServer]:
    server = HttpServer(tmp_path, port, legacy=request.param == "legacy")
    server.start()
    yield server
    server.kill()


class TestStdio:
    async def test_annotations_decide_risk_and_approval(self, tmp_path: Path) -> None:
        async with opened(tmp_path, stdio(tmp_path)) as registry:
            found = {s.name: (s.risk, s.approval, s.source) for s in registry.specs() if s.name.startswith("test__")}
        assert found["test__lookup"] == ("read_only", "never", "mcp:test")
        assert found["test__label"] == ("idempotent", "never", "mcp:test")
        assert found["test__remove"] == ("idempotent", "always", "mcp:test")  # it may destroy
        assert found["test__record"] == ("side_effect", "always", "mcp:test")

    async def test_the_file_overrides_hints_and_chooses_tools(self, tmp_path: Path) -> None:
        more = """
    allow: [lookup, record, label]
    deny: [label]
    tools:
      record: {risk: idempotent, approval: by_rule, timeout_seconds: 5}
      lookup: {risk: side_effect}
"""
        async with opened(tmp_path, stdio(tmp_path, more)) as registry:
            found = {s.name: s for s in registry.specs() if s.name.startswith("test__")}
        assert sorted(found) == ["test__lookup", "test__record"]
        record = found["test__record"]
        assert (record.risk, record.approval, record.timeout_seconds) == ("idempotent", "by_rule", 5)
        assert (found["test__lookup"].risk, found["test__lookup"].approval) == ("side_effect", "always")

    async def test_untrusted_annotations_count_for_nothing(self, tmp_path: Path) -> None:
        async with opened(tmp_path, stdio(tmp_path, "    trust_annotations: false\n")) as registry:
            risks = {(s.risk, s.approval) for s in registry.specs() if s.name.startswith("test__")}
        assert risks == {("side_effect", "always")}

    async def test_environment_holds_no_secret_but_the_named_one(self, tmp_path: Path) -> None:
        async with opened(tmp_path, stdio(tmp_path)) as registry:
            result = await registry.call("test__environment", {}, tool_context())
            pid = result.data["pid"]
            assert os.getpgid(pid) == pid  # a group of its own
        assert result.data["environment"]["API_TOKEN"] == "s3cret"
        assert "must-not-leak" not in result.content
        await until(lambda: not Path(f"/proc/{pid}").exists() if Path("/proc").exists() else not _alive(pid))

    async def test_results_and_failures(self, tmp_path: Path) -> None:
        artifacts = MemoryArtifacts()
        async with opened(tmp_path, stdio(tmp_path)) as registry:
            done = await registry.call("test__label", {"name": "x"}, tool_context())
            failed = await registry.call("test__broken", {}, tool_context())
            picture = await registry.call("test__picture", {}, tool_context(artifacts=artifacts))
            unkept = await registry.call("test__picture", {}, tool_context())
        assert (done.status, done.content) == ("done", "labelled x")
        assert failed.status == "failed"
        assert "the disk is full" in failed.content
        assert picture.images == ("artifact:a1;image/png",)
        assert "one pixel" in picture.content
        assert artifacts.contents["a1"].startswith(b"\x89PNG")
        assert unkept.images == ()
        assert "could not be kept" in unkept.content

    async def test_a_side_effect_under_which_the_server_dies_is_unknown_and_not_repeated(self, tmp_path: Path) -> None:
        async with opened(tmp_path, stdio(tmp_path)) as registry:
            result = await registry.call("test__record", {"exit_first": True}, tool_context())
            assert result.status == "unknown"
            assert "may or may not" in result.content
            again = await registry.call("test__record", {}, tool_context())
        assert again == ToolResult("done", "recorded", {"result": "recorded"})
        assert runs(tmp_path) == ["record", "record"]

    async def test_a_read_under_which_the_server_dies_is_sent_once_more(self, tmp_path: Path) -> None:
        async with opened(tmp_path, stdio(tmp_path)) as registry:
            result = await registry.call("test__lookup", {"exit_once": True}, tool_context())
        assert (result.status, result.content) == ("done", "looked up 2")

    async def test_an_idle_server_that_dies_is_noticed_and_started_again(self, tmp_path: Path) -> None:
        async with opened(tmp_path, stdio(tmp_path)) as registry:
            first = (await registry.call("test__environment", {}, tool_context())).data["pid"]
            os.kill(first, 9)
            await until(lambda: bool(registry.problems()))
            await until(lambda: not registry.problems())
            second = (await registry.call("test__environment", {}, tool_context())).data["pid"]
        assert second != first

    async def test_timeout(self, tmp_path: Path) -> None:
        more = "    tools: {record: {timeout_seconds: 0.5}}\n"
        async with opened(tmp_path, stdio(tmp_path, more)) as registry:
            started = time.monotonic()
            result = await registry.call("test__record", {"seconds": 20}, tool_context())
            elapsed = time.monotonic() - started
            assert (await registry.call("test__label", {"name": "y"}, tool_context())).status == "done"
        assert result.status == "unknown"
        assert elapsed < 3

    async def test_a_server_that_is_down_costs_only_its_tools(self, tmp_path: Path) -> None:
        yaml = stdio(tmp_path) + "  absent: {command: /no/such/program}\n"
        async with opened(tmp_path, yaml) as registry:
            assert registry.get("test__lookup") is not None
            assert [p for p in registry.problems() if p.startswith("mcp:absent: FileNotFoundError")]

    async def test_a_server_cannot_take_the_name_of_a_local_tool(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "taken_tools.py").write_text(
            "from worker.agent.tools import tool\n"
            "@tool(name='test__lookup')\ndef mine() -> str:\n    'Mine.'\n    return 'mine'\n"
        )
        monkeypatch.setattr(sys, "path", list(sys.path))
        async with opened(tmp_path, "python: [taken_tools]" + stdio(tmp_path)) as registry:
            assert (await registry.call("test__lookup", {}, tool_context())).content == "mine"
            assert registry.problems() == ["mcp:test: 'test__lookup' is the name of another tool: left out"]
            assert len([s for s in registry.specs() if s.name == "test__lookup"]) == 1

    async def test_what_a_server_says_before_it_dies_explains_why_it_is_down(self, tmp_path: Path) -> None:
        yaml = "mcp_servers:\n  dying: {command: sh, args: [-c, 'echo no licence >&2; exit 3']}\n"
        async with opened(tmp_path, yaml) as registry:
            assert "no licence" in registry.problems()[0]


class TestHttp:
    async def test_call(self, http: HttpServer, tmp_path: Path) -> None:
        async with opened(tmp_path, http.yaml) as registry:
            result = await registry.call("test__label", {"name": "x"}, tool_context())
        assert (result.status, result.content) == ("done", "labelled x")

    async def test_a_changed_list_is_taken_over(self, http: HttpServer, tmp_path: Path) -> None:
        async with opened(tmp_path, http.yaml) as registry:
            await asyncio.sleep(0.3)  # the stream of notifications opens after the session
            assert registry.get("test__grown") is None
            await registry.call("test__grow", {}, tool_context())
            await until(lambda: registry.get("test__grown") is not None)
            result = await registry.call("test__grown", {}, tool_context())
        assert result.content == "grown"

    async def test_a_restart_during_a_call_leaves_it_unknown(self, http: HttpServer, tmp_path: Path) -> None:
        async with opened(tmp_path, http.yaml) as registry:
            call = asyncio.ensure_future(registry.call("test__record", {"seconds": 30}, tool_context()))
            await until(lambda: runs(tmp_path) == ["record"])
            http.kill()
            result = await asyncio.wait_for(call, PATIENCE_SECONDS)
            http.start()
            after = await registry.call("test__label", {"name": "z"}, tool_context())
        assert result.status == "unknown"
        assert after.status == "done"
        assert runs(tmp_path) == ["record"]

    async def test_a_restart_between_calls_costs_a_read_nothing(self, http: HttpServer, tmp_path: Path) -> None:
        async with opened(tmp_path, http.yaml) as registry:
            assert (await registry.call("test__lookup", {}, tool_context())).status == "done"
            http.kill()
            http.start()  # a legacy client now holds a session that the server does not know: -32600
            result = await registry.call("test__lookup", {}, tool_context())
        assert (result.status, result.content) == ("done", "looked up 2")

    async def test_a_server_that_comes_up_late(self, tmp_path: Path, port: int) -> None:
        server = HttpServer(tmp_path, port, legacy=False)
        async with opened(tmp_path, server.yaml) as registry:
            assert registry.get("test__label") is None
            assert registry.problems()
            try:
                server.start()
                await until(lambda: registry.get("test__label") is not None)
                assert registry.problems() == []
            finally:
                server.kill()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
