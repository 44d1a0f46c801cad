"""The demo: a small incident, tools that act on its files, a model that needs no API key, and the player."""
