"""Real parts for every test that wants one; each plugin says what it starts."""

pytest_plugins = ["tests.support.valkey", "tests.support.postgres", "tests.support.llm"]
