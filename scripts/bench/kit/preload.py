"""Imported by the process that workers are forked from: litellm, before the fork."""

from worker.agent.model import import_litellm

import_litellm()
