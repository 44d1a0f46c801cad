"""The publisher: ordered, batched, idempotent writes of a turn's events, and their live fan-out."""
