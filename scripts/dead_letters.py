"""Dead letters: jobs that could not become a turn, given to the queue again or removed."""

from __future__ import annotations

from typing import Any

from scripts.desk import Desk
from scripts.talk import submit
from shared.errors import RequestInvalid, RequestTooLarge
from shared.store.base import Row

_FUNCTIONS = {"worker.jobs.ask": "ask", "worker.jobs.retry": "retry"}
_LOOKED_AT = 10_000  # letters


def can_be_sent_again(letter: Row) -> bool:
    """It holds a whole request of ours, and one that is not wrong by itself. Decisions do not: their tokens are not
    kept in letters."""
    payload = letter["payload"]
    if letter["code"] in (RequestInvalid.code, RequestTooLarge.code):
        return False
    return letter["function"] in _FUNCTIONS and isinstance(payload, dict) and "too_large_to_keep" not in payload


async def requeue(desk: Desk, letter_id: int) -> None:
    """Record the letter's request as its sender meant it, and remove the letter once that worked.

    Raises ``RequestInvalid`` when there is no such letter or it cannot be sent again, and what ``submit`` raises; the
    letter then stays.
    """
    letter = next((x for x in await desk.store.dead_letters(_LOOKED_AT) if x["letter_id"] == letter_id), None)
    if letter is None:
        raise _no_letter(letter_id)
    if not can_be_sent_again(letter):
        raise RequestInvalid(
            f"Dead letter {letter_id} cannot be sent again as it is: {letter['function'] or 'an unknown job'}: "
            f"{letter['description']}",
            hint=f"Send it again from where it came from; turnkeeper requeue {letter_id} --discard removes it.",
        )
    fields: dict[str, Any] = {"request_id": letter["job_id"], "queue": letter["queue"], **letter["payload"]}
    submitted = await submit(desk, _FUNCTIONS[letter["function"]], fields)
    await desk.store.take_dead_letter(letter_id)
    row = {"letter_id": letter_id, "conversation_id": submitted.conversation_id, "turn": submitted.turn}
    text = f"Recorded as turn {submitted.turn} of conversation {submitted.conversation_id}; the letter is removed."
    desk.out.row(row, text=text)


async def discard(desk: Desk, letter_id: int) -> None:
    """Remove a letter for good. Raises ``RequestInvalid``."""
    letter = await desk.store.take_dead_letter(letter_id)
    if letter is None:
        raise _no_letter(letter_id)
    desk.out.row(letter, text=f"Removed dead letter {letter_id}.")


def _no_letter(letter_id: int) -> RequestInvalid:
    return RequestInvalid(f"There is no dead letter {letter_id}.", hint="turnkeeper doctor lists those there are.")
