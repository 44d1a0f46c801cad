"""The publisher: ordered, batched, idempotent writes of a turn's events, and their live fan-out.

``EventPublisher`` belongs to one attempt of one turn and is the only one that writes its events; ``RedisLive``
belongs to a process and carries what was stored, and deltas, to people who are watching.
"""

from publisher.live import LiveSink, RedisLive
from publisher.publisher import EventPublisher, PublisherLimits

__all__ = ["EventPublisher", "LiveSink", "PublisherLimits", "RedisLive"]
