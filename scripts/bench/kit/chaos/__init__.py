"""The chaos run: a plan, workers that journal what they do, people, faults, and checks that share no code with the
product.

``plan`` (what is asked) → ``installation`` (Redis, store) → ``people`` and ``worker`` (processes) under ``storm``
(faults, on the workers of ``fleet``), watched by ``pickup`` → ``rows`` and ``check`` (plain SQL and the journals) →
``report``.
"""
