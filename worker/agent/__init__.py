"""The agent: the tool-calling loop, the model behind it, and its tools."""
