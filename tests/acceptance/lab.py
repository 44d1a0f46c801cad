"""A room to kill workers in: one Redis, one store, one model server for a whole module, and workers forked in a moment.

Jobs come from plain RQ. Every worker listens to queues of its own; a request says on which queue the rings for its
turn go afterwards, so a test decides who takes a turn first and who takes it over.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from scripts.bench.kit.llm_server import MODEL, Call, LlmServer, Reply, Request
from scripts.bench.kit.nursery import Nursling, nursery
from shared.settings import Settings
from shared.store.migrate import migrate
from tests.acceptance.invariants import Database, Row, Story, broken

STORES = ("sqlite", "postgres", "supabase")
REPOSITORY = Path(__file__).parents[2]
TOOLS = 'python: ["tests.acceptance.gadgets"]\n'
FAST = {
    "TURNKEEPER_LEASE_SECONDS": "3",
    "TURNKEEPER_REAP_SECONDS": "0.2",
    "TURNKEEPER_DATABASE_POOL_SIZE": "2",
}
HEIR = "heir"  # the queue of whoever takes turns over
PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 0.05
_OURS = ("TURNKEEPER_", "REDIS_", "DATABASE_", "SUPABASE_")


class Lab:
    """See the module. ``database`` is what the store writes to, read by plain SQL."""

    def __init__(self, folder: Path, settings: Settings, database: Database, redis_url: str, llm: LlmServer) -> None:
        self.folder, self.settings, self.database, self.llm = folder, settings, database, llm
        self.redis_url = redis_url
        self.redis = Redis.from_url(redis_url)
        self.workers: list[Nursling] = []
        self._context = nursery()
        (folder / "tools.yaml").write_text(TOOLS)

    def environment(self, **more: str) -> dict[str, str]:
        """Of a worker, or of a command."""
        settings = self.settings
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
        environment |= {
            "PYTHONPATH": str(REPOSITORY),
            "TURNKEEPER_HOME": str(settings.home),
            "REDIS_URL": self.redis_url,
            "TURNKEEPER_MODEL": f"openai/{MODEL}",
            "TURNKEEPER_TOOLS": str(self.folder / "tools.yaml"),
            "GADGETS_JOURNAL": str(self.folder / "journal"),
            **self.llm.environment,
            **FAST,
        }
        if settings.database_url is not None:
            environment["DATABASE_URL"] = settings.database_url.get_secret_value()
        if settings.supabase_url is not None and settings.supabase_key is not None:
            environment["SUPABASE_URL"] = settings.supabase_url
            environment["SUPABASE_KEY"] = settings.supabase_key.get_secret_value()
        return environment | more

    def worker(self, *queues: str, fault: str = "", slots: int = 16, **environment: str) -> Nursling:
        """Start a worker on these queues; it may not be ready yet."""
        log = self.folder / f"worker-{len(self.workers)}.log"
        arguments = [part for queue in queues for part in ("--queue", f"{queue}={slots}")]
        made = Nursling(self._context, self.environment(TURNKEEPER_FAULT=fault, **environment), log, arguments)
        self.workers.append(made)
        return made

    def enqueue(self, queue: str, function: str, /, **arguments: Any) -> Job:
        """A plain RQ job."""
        return Queue(queue, connection=self.redis, serializer=JSONSerializer).enqueue(
            f"worker.jobs.{function}", **arguments
        )

    def ask(self, text: str, conversation: str = "", *, on: str = HEIR, heir: str = HEIR) -> str:
        """Ask on a queue, with later rings for the turn on ``heir``; the conversation."""
        conversation = conversation or str(uuid.uuid4())
        self.enqueue(on, "ask", conversation_id=conversation, ask=text, queue=heir)
        return conversation

    def paused(self, names: Iterable[object], heir: str = HEIR) -> list[str]:
        """For each name a conversation of ``WorkingModel`` in which the restart waits for its approval."""
        made = [self.ask(f"work {name}", heir=heir) for name in names]
        self.until(lambda: all(self.ended(conversation, 1) for conversation in made), "the pauses")
        return made

    def approve(self, conversation: str, *, on: str = HEIR, heir: str = HEIR) -> None:
        """Approve all that waits in a conversation."""
        waiting = self.story(conversation).named("approval_required")[-1]["data"]["pending_approvals"]
        decisions = [{"approved": True, **{k: w[k] for k in ("tool_call_id", "approval_token")}} for w in waiting]
        self.enqueue(on, "tool_decisions", conversation_id=conversation, tool_decisions=decisions, queue=heir)

    # What came of it

    def story(self, conversation: str) -> Story:
        return Story.of(self.database, conversation)

    def turn(self, conversation: str, number: int) -> Row | None:
        found = self.database.rows(
            "SELECT * FROM conversation_turns WHERE conversation_id = %s AND turn = %s", conversation, number
        )
        return found[0] if found else None

    def ended(self, conversation: str, turn: int) -> bool:
        row = self.turn(conversation, turn)
        return row is not None and row["status"] not in ("pending", "running")

    @property
    def effects(self) -> Counter[str]:
        """The tools' own record of their side effects."""
        journal = self.folder / "journal"
        return Counter(journal.read_text().splitlines() if journal.exists() else ())

    def broken(self, conversation: str) -> list[str]:
        return broken(self.story(conversation), self.effects)

    def until(self, condition: Callable[[], object], what: str = "", seconds: float = PATIENCE_SECONDS) -> None:
        """Look until something is so. Raises ``AssertionError`` with the ends of all logs."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"{w.pid} {w.ended}\n{w.log.read_text()[-1000:]}" for w in self.workers)
                raise AssertionError(f"not within {seconds:g} s: {what}\n{logs}")
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        for worker in self.workers:
            worker.leave()
        for worker in self.workers:
            worker.stop()
        self.database.close()
        self.redis.close()


@contextmanager
def open_lab(store: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Lab]:
    """A lab on a store, empty, until the ``with`` block ends."""
    get = request.getfixturevalue
    valkey = get("valkey_session")
    with ExitStack() as stack:
        if store == "sqlite":
            settings = Settings(home=folder / "home")
            migrate(settings)
            database = Database(settings.sqlite_path)
        else:
            url: str = get("_migrated_url")
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute("TRUNCATE turnkeeper.conversations, turnkeeper.dead_letters CASCADE")
            where = {"database_url": url}
            if store == "supabase":
                where = {"supabase_url": get("_postgrest"), "supabase_key": get("service_key")}
            settings = Settings(home=folder / "home", **where)
            database = Database(url)
        with Redis.from_url(valkey.url) as redis:
            redis.flushall()
        llm = stack.enter_context(LlmServer())
        lab = Lab(folder, settings, database, valkey.url, llm)
        stack.callback(lab.close)
        yield lab
    assert llm.violations == []


class WorkingModel:
    """A script for the model server. ``work NAME`` leads to a gated restart of ``gated-NAME``, then to a look at
    something with odd characters and a bump of ``free-NAME`` side by side, then to an answer; anything else is
    answered at once."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, int]] = Counter()
        """How often each question was answered at each step."""
        self.last: dict[str, list[dict[str, Any]]] = {}
        """The messages of the last request of each question."""

    def __call__(self, request: Request) -> Reply:
        messages = request.messages
        at = max(i for i, m in enumerate(messages) if m["role"] == "user")
        question = str(messages[at]["content"])
        step = sum(m["role"] == "assistant" for m in messages[at:])
        self.asked[question, step] += 1
        self.last[question] = messages
        name = question.removeprefix("work ")
        if name == question:
            return Reply(f"That is all about {question}.")
        match step:
            case 0:
                return Reply("A restart helps.", calls=[Call("restart", {"deployment": f"gated-{name}"}, f"g-{name}")])
            case 1:
                look = Call("noise", {"seed": name}, f"n-{name}")
                return Reply("I look.", calls=[look, Call("bump", {"counter": f"free-{name}"}, f"f-{name}")])
            case _:
                return Reply(f"Worked on {name}.")

    def told(self, question: str, tool_call_id: str) -> str:
        """What the model read last as the result of a call."""
        [result] = [m for m in self.last[question] if m.get("tool_call_id") == tool_call_id]
        content = result["content"]
        return content if isinstance(content, str) else json.dumps(content)
