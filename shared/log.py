"""Logs: one JSON object a line on stderr, with conversation, turn, attempt, job and worker bound in each.

No secret and no text of a conversation leaves at info or above: fields that hold them are masked by name, and secrets
inside other texts by their shape. At debug the texts are there; secrets never are.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

import structlog
from structlog.contextvars import bind_contextvars, bound_contextvars, clear_contextvars
from structlog.typing import FilteringBoundLogger, Processor

from shared.clean import clean
from shared.errors import QueueUnavailable, StoreUnavailable, TurnkeeperError
from shared.redaction import Redactor

MASK = "***"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_SECRET = re.compile(r"(?i)(^|[_-])(password|passwd|secret|token|api_?key|key|authorization|cookie|dsn)s?$")
_TEXT = frozenset({"ask", "answer", "arguments", "content", "feedback", "message", "messages", "prompt", "text"})
_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):[^/@\s]+@")


def configure_logging(
    level: str = "info", *, json: bool = True, stream: TextIO | None = None, redactor: Redactor | None = None
) -> None:
    """Send everything to ``stream`` (stderr): ours from ``level``, libraries from warning. May be called again.
    ``redactor``: the installation's, so that markers are those of the log of events; by default one of the process."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        Mask(redactor or Redactor.for_process()),
    ]
    render: Processor = structlog.processors.JSONRenderer(_dumps) if json else structlog.dev.ConsoleRenderer()
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("worker", "publisher", "shared", "scripts"):
        logging.getLogger(name).setLevel(LEVELS[level])
    for name in ("rq", "rq.worker", "rq.job", "LiteLLM", "LiteLLM Router", "LiteLLM Proxy", "httpx"):
        library = logging.getLogger(name)  # RQ and litellm bring handlers of their own
        library.handlers[:] = []
        library.propagate = True
        library.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger: ``log.info("turn_claimed", attempt=2)``. The event is a name, facts are fields."""
    logger: FilteringBoundLogger = structlog.get_logger(name)
    return logger


def bind(**fields: Any) -> None:
    """Bind ``conversation``, ``turn``, ``attempt``, ``job``, ``worker`` … in this task and the tasks it starts."""
    bind_contextvars(**fields)


def bound(**fields: Any) -> AbstractContextManager[None]:
    """The same for the length of a ``with`` block."""
    return bound_contextvars(**fields)


def unbind_all() -> None:
    clear_contextvars()


@contextmanager
def exit_on_error() -> Iterator[None]:
    """For entry points: an error of ours ends the process with one line on stderr, and with status 3 when a
    service is unreachable, else 2."""
    try:
        yield
    except TurnkeeperError as error:
        sys.stderr.write(f"turnkeeper: {error}\n")
        raise SystemExit(3 if isinstance(error, StoreUnavailable | QueueUnavailable) else 2) from None


class Mask:
    """Processor: no secrets; no texts of conversations unless the entry is at debug."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor

    def __call__(self, _logger: Any, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        return {key: self._masked(key, value, texts=method == "debug") for key, value in event.items()}

    def _masked(self, key: str, value: Any, *, texts: bool) -> Any:
        if key.startswith("_") or value is None or isinstance(value, int | float):
            return value
        if _SECRET.search(key) or (key in _TEXT and not texts):
            return MASK if value else value
        if isinstance(value, str):
            return self._redactor.text(_URL_PASSWORD.sub(rf"\1:{MASK}@", value))
        if isinstance(value, dict):
            return {k: self._masked(str(k), v, texts=texts) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._masked("", v, texts=texts) for v in value]
        return value


def _dumps(event: Any, **_options: Any) -> str:
    import orjson

    return orjson.dumps(clean(event)).decode()
