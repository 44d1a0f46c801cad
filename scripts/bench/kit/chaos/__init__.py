"""The chaos run: a plan, workers whose tools journal what they do, people, faults, and checks that share no code with
the product.

``plan`` (what is asked) → ``installation`` (Redis, store) → ``people`` and ordinary workers (with ``model`` and
``tools``) under ``storm`` (faults, on the workers of ``fleet``), watched by ``pickup`` → ``rows`` and ``check`` (plain
SQL and the journals) → ``report``.
"""
