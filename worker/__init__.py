"""The worker: RQ worker class, job functions, the turn, the agent loop, and memory."""
