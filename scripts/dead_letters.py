"""Dead letters: jobs that could not become a turn, given to the queue again."""

from __future__ import annotations

from typing import Any

from scripts.desk import Desk
from scripts.talk import submit
from shared.errors import RequestInvalid

_FUNCTIONS = {"worker.jobs.ask": "ask", "worker.jobs.tool_decisions": "tool_decisions", "worker.jobs.retry": "retry"}
_LOOKED_AT = 10_000  # letters


async def requeue(desk: Desk, letter_id: int) -> None:
    """Record the letter's request as its sender meant it, and remove the letter once that worked.

    Raises ``RequestInvalid`` when there is no such letter or it holds no request of ours, and what ``submit`` raises;
    the letter then stays.
    """
    letter = next((x for x in await desk.store.dead_letters(_LOOKED_AT) if x["letter_id"] == letter_id), None)
    if letter is None:
        raise RequestInvalid(f"There is no dead letter {letter_id}.", hint="turnkeeper doctor lists those there are.")
    kind = _FUNCTIONS.get(letter["function"])
    if kind is None or not isinstance(letter["payload"], dict):
        raise RequestInvalid(
            f"Dead letter {letter_id} holds no request but a job of {letter['function'] or 'an unknown function'}.",
            hint="Send it again from where it came from.",
        )
    fields: dict[str, Any] = {"request_id": letter["job_id"], "queue": letter["queue"], **letter["payload"]}
    submitted = await submit(desk, kind, fields)
    await desk.store.take_dead_letter(letter_id)
    row = {"letter_id": letter_id, "conversation_id": submitted.conversation_id, "turn": submitted.turn}
    text = f"Recorded as turn {submitted.turn} of conversation {submitted.conversation_id}; the letter is removed."
    desk.out.row(row, text=text)
