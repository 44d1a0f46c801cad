"""Settings: one frozen object, read once at start, every knob a field with its unit and its default.

Four names are the ones that hosting platforms already set (``REDIS_URL``, ``DATABASE_URL``, ``SUPABASE_URL``,
``SUPABASE_KEY``); the rest are ``TURNKEEPER_*``. With no URL set, Redis and the store are embedded under
``TURNKEEPER_HOME``.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from shared.errors import ConfigurationError
from shared.faults import plan_of

_PLAIN_PATH = re.compile(r"[A-Za-z0-9._/-]+")
_SOCKET_PATH_LIMIT = 100  # bytes; sun_path holds 104 on macOS, 108 on Linux

DEFAULT_SYSTEM_PROMPT = (
    "You are a careful operations assistant. Use the tools to look before you conclude, say what you found and where, "
    "and keep answers short. A tool call that changes something may need a person's approval: ask for exactly what you "
    "need. When a person denies a call, follow their words and choose another way."
)


class Settings(BaseSettings):
    """Everything that can be configured. Durations are seconds, sizes bytes unless the name says otherwise."""

    model_config = SettingsConfigDict(env_prefix="TURNKEEPER_", frozen=True, extra="ignore", populate_by_name=True)

    # Where things are
    home: Path = Field(Path("~/.turnkeeper"), description="Folder of the embedded Redis and store")
    redis_url: str | None = Field(None, validation_alias="REDIS_URL", description="Redis; embedded when unset")
    database_url: SecretStr | None = Field(None, validation_alias="DATABASE_URL", description="Postgres")
    supabase_url: str | None = Field(None, validation_alias="SUPABASE_URL", description="Supabase project URL")
    supabase_key: SecretStr | None = Field(None, validation_alias="SUPABASE_KEY", description="service_role key")
    schema_name: str = Field("turnkeeper", pattern=r"^[a-z_][a-z0-9_]{0,62}$", description="Postgres schema")
    database_pool_size: int = Field(10, ge=1, description="Postgres connections of one process, at most")

    # The agent
    model: str = Field("", description="litellm model name, such as `openai/gpt-4.1`")
    system_prompt: str = Field(DEFAULT_SYSTEM_PROMPT, description="First message of every model call")
    tools: Path | None = Field(None, description="YAML file of tools and MCP servers")
    max_steps: int = Field(40, ge=1, description="Model calls in one turn, at most; the last one gets no tools")
    turn_deadline_seconds: float = Field(1800, gt=0, description="Time of one turn, over all attempts")
    model_timeout_seconds: float = Field(300, gt=0, description="Time of one model call")
    model_idle_seconds: float = Field(60, gt=0, description="Longest silence within a model's stream")
    model_retries: int = Field(3, ge=0, description="Tries after the first, before any text was shown")
    tool_timeout_seconds: float = Field(60, gt=0, description="Time of a tool call whose tool names none")
    tool_result_tokens: int = Field(8_000, ge=100, description="Tokens of one tool result in the history, at most")
    approval_seconds: float = Field(604_800, gt=0, description="Life of an approval request")
    accept_call_keys: bool = Field(
        False, description="Accept (turn, step, call_index) in a decision in place of its approval_token"
    )

    # Requests
    default_account: str = Field("default", min_length=1, description="Account of a conversation that names none")
    request_bytes: int = Field(4_000_000, ge=1_000, description="Size of a request, images apart, at most")

    # The worker
    slots: Annotated[dict[str, int], NoDecode] = Field(
        {"interactive": 64, "background": 8}, description="Turns at once per queue: `interactive=64,background=8`"
    )
    lease_seconds: float = Field(10, ge=1, description="A worker that was silent for so long loses its turn")
    reap_seconds: float = Field(2, gt=0, description="How often due conversations are rung")
    drain_seconds: float = Field(20, ge=0, description="Time to reach a safe point after SIGTERM")
    hard_deadline_seconds: float = Field(60, ge=0, description="Time for a running side effect after SIGTERM")
    max_crashes: int = Field(4, ge=1, description="Crashes without progress before a turn ends with an error")
    tool_threads: int = Field(32, ge=1, description="Threads for tools that are plain functions")

    # Limits
    turn_tokens: int | None = Field(None, ge=1, description="Tokens of one turn, prompt and completion; off when unset")
    turn_cost_usd: float | None = Field(None, gt=0, description="Cost of one turn; off when unset")
    account_turns: int | None = Field(None, ge=1, description="Turns of one account at once, over all workers")
    account_cost_usd: float | None = Field(None, gt=0, description="Cost of one account in a day (UTC)")

    # The publisher
    batch_events: int = Field(64, ge=1, description="Events in a batch, at most")
    batch_bytes: int = Field(256_000, ge=1_000, description="Size of a batch, at most (one event may be larger)")
    batch_age_seconds: float = Field(0.25, ge=0, description="Longest wait of an event for its batch")
    live_entries: int = Field(2_000, ge=10, description="Entries of a conversation's live stream, at most")
    live_seconds: float = Field(3_600, gt=0, description="Life of a live stream after its last entry")
    snapshots_kept: int = Field(1, ge=1, description="Newest snapshots that keep their messages")

    # Redaction
    redaction: Literal["on", "off"] = Field("on", description="Replace secrets in what people, tools and models say")
    redact: Path | None = Field(None, description="YAML file of further patterns, `name: regular expression`")
    redaction_key: SecretStr | None = Field(
        None, description="Key of the markers' digests; by default derived, see docs/security.md"
    )

    # Seen from outside
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged")
    health_port: int | None = Field(
        None, ge=0, le=65_535, description="Port of `/live` and `/ready`; not served when unset"
    )
    health_host: str = Field("0.0.0.0", description="Address of the health port")  # noqa: S104  (probes come from outside)
    fault: str = Field("", description="For tests only: where a worker dies; `shared/faults.py` explains it")

    @field_validator("slots", mode="before")
    @classmethod
    def _parse_slots(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        slots = {}
        for part in filter(None, (p.strip() for p in value.split(","))):
            name, _, count = part.partition("=")
            if not name or not count.isdigit() or int(count) < 1:
                raise ValueError(f"expected queue=count pairs such as interactive=64,background=8, got {part!r}")
            slots[name] = int(count)
        if not slots:
            raise ValueError("names no queue")
        return slots

    @field_validator("fault")
    @classmethod
    def _known_fault(cls, value: str) -> str:
        plan_of(value)
        return value

    @field_validator("home", "tools", "redact")
    @classmethod
    def _expand(cls, value: Path | None) -> Path | None:
        return value.expanduser().absolute() if value is not None else None

    @field_validator("redis_url", "database_url", "supabase_url", "supabase_key", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: Any) -> Any:
        return None if value == "" else value

    @model_validator(mode="after")
    def _one_store(self) -> Settings:
        if self.database_url and self.supabase_url:
            raise ValueError("DATABASE_URL and SUPABASE_URL are both set; set one of them")
        if self.supabase_url and not self.supabase_key:
            raise ValueError("SUPABASE_URL is set but SUPABASE_KEY is not")
        return self

    @property
    def store_kind(self) -> Literal["sqlite", "postgres", "supabase"]:
        if self.supabase_url:
            return "supabase"
        return "postgres" if self.database_url else "sqlite"

    @property
    def sqlite_path(self) -> Path:
        return self.home / "turnkeeper.db"

    @cached_property
    def socket_path(self) -> Path:
        """Unix socket of the embedded Redis. In the temporary folder when the path under home would be too long, or
        has a character that a URL or redis-py's parser of ``CLIENT INFO`` (which splits at spaces) would mistake."""
        path = self.home / "valkey.sock"
        if len(str(path)) <= _SOCKET_PATH_LIMIT and _PLAIN_PATH.fullmatch(str(path)):
            return path
        digest = hashlib.sha256(str(self.home).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"turnkeeper-{digest}.sock"

    @property
    def embedded_redis(self) -> bool:
        return self.redis_url is None

    @property
    def effective_redis_url(self) -> str:
        return self.redis_url or f"unix://{self.socket_path}"


def load_settings(**overrides: Any) -> Settings:
    """Read the environment. Raises ``ConfigurationError`` with one line that names each wrong setting."""
    try:
        return Settings(**overrides)
    except ValidationError as error:
        wrong = "; ".join(
            f"{_setting_name(e['loc'])}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()
        )
        raise ConfigurationError(f"Wrong setting: {wrong}.") from None


def _setting_name(location: tuple[int | str, ...]) -> str:
    name = str(location[0]) if location else ""
    if not name or name.isupper():
        return name or "settings"
    return f"TURNKEEPER_{name.upper()}"
