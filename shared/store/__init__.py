"""The store: one Protocol (``base``), what its implementations share (``json_store``), and the way to open one."""
