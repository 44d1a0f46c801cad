"""Tools: declared in Python, offered by MCP servers, or built in, behind one ``Toolbox``.

``tool`` declares a Python function; ``load_toolbox`` reads the YAML file of ``TURNKEEPER_TOOLS``. A tool says what it
risks and who decides about a call (``rules``); its definition is checked when it is loaded (``schema``), its arguments
before anything runs (``arguments``, ``schema``). A call ends as a ``ToolResult`` and never as an exception; where
nobody saw the end of a side effect, the result says so.
"""

from worker.agent.base import ToolContext, ToolResult
from worker.agent.tools.declare import tool
from worker.agent.tools.registry import ToolRegistry, load_toolbox

__all__ = ["ToolContext", "ToolRegistry", "ToolResult", "load_toolbox", "tool"]
