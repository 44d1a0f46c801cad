"""The peer: the same turn on LangGraph with its Postgres checkpointer, in process and without a queue."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from scripts.bench.kit.worker import fresh_text


@asynccontextmanager
async def thread(url: str, history: int) -> AsyncIterator[Callable[[str], Awaitable[None]]]:
    """A thread that holds ``history`` messages; the value runs one turn for a question. Raises ``ImportError``."""
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
    from langgraph.graph import END, START, MessagesState, StateGraph

    async def model(state: Any) -> dict[str, Any]:
        last = state["messages"][-1]
        if isinstance(last, HumanMessage):
            call = {"name": "look", "args": {"at": fresh_text(str(last.content), 40)}, "id": "c1"}
            return {"messages": [AIMessage("", tool_calls=[call])]}
        return {"messages": [AIMessage(fresh_text(str(last.content)))]}

    async def tools(state: Any) -> dict[str, Any]:
        calls = state["messages"][-1].tool_calls
        return {"messages": [ToolMessage(fresh_text(c["args"]["at"]), tool_call_id=c["id"]) for c in calls]}

    def route(state: Any) -> str:
        return "tools" if state["messages"][-1].tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("model", model)
    graph.add_node("tools", tools)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", route)
    graph.add_edge("tools", "model")
    async with AsyncPostgresSaver.from_conn_string(url) as saver:
        await saver.setup()
        app = graph.compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": f"bench-{history}-{time.time_ns()}"}}
        if history:
            await app.aupdate_state(config, {"messages": _history(history, HumanMessage, AIMessage)}, as_node="model")

        async def turn(question: str) -> None:
            await app.ainvoke({"messages": [HumanMessage(question)]}, config)

        yield turn


def _history(count: int, human: Any, ai: Any) -> Sequence[Any]:
    return [(human if i % 2 == 0 else ai)(fresh_text(f"old {i}")) for i in range(count)]
