"""The incident's cluster: JSON files in one folder, which the demo's tools read and one of them changes.

``journal.jsonl`` gets one line per restart that really happened, so that "once" can be checked.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "TURNKEEPER_DEMO_INCIDENT"
_SHIPPED = Path(__file__).parent / "incident"
_LOG_LINES = 200

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A folder with ``pods.json``, ``deployment.json``, ``rollouts.json``, ``images.json`` and ``logs/POD.txt``.

    Lookups raise ``LookupError`` with a sentence for the model when there is no such thing.
    """

    folder: Path

    @classmethod
    def of_environment(cls) -> Cluster:
        """The cluster that the demo set up for its worker."""
        return cls(Path(os.environ[FOLDER_VARIABLE]))

    @classmethod
    def fresh(cls, folder: Path) -> Cluster:
        """A new copy of the shipped incident, replacing what an earlier demo left in ``folder``."""
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(_SHIPPED, folder)
        return cls(folder)

    def pods(self, namespace: str, app: str | None = None) -> list[Record]:
        found = [p for p in self._read("pods.json") if p["namespace"] == namespace and app in (None, p["app"])]
        if not found:
            raise LookupError(f"No pods of {app or 'any app'} in namespace {namespace}.")
        return found

    def logs(self, namespace: str, pod: str) -> str:
        if pod not in {p["name"] for p in self.pods(namespace)}:
            raise LookupError(f"No pod {pod} in namespace {namespace}.")
        path = self.folder / "logs" / f"{pod}.txt"
        return "".join(path.read_text().splitlines(keepends=True)[-_LOG_LINES:]) if path.exists() else ""

    def deployment(self, namespace: str, deployment: str) -> Record:
        found: Record = self._read("deployment.json")
        if (found["namespace"], found["name"]) != (namespace, deployment):
            raise LookupError(f"No deployment {deployment} in namespace {namespace}.")
        return found

    def rollouts(self, namespace: str, deployment: str) -> list[Record]:
        self.deployment(namespace, deployment)
        return [r for r in self._read("rollouts.json") if r["deployment"] == deployment]

    def image(self, image: str) -> Record:
        for found in self._read("images.json"):
            if found["image"] == image:
                record: Record = found
                return record
        raise LookupError(f"No image {image} in the registry.")

    def restart(self, namespace: str, deployment: str, idempotency_key: str) -> Record:
        """Replace the deployment's pods by new ones and note it in the journal; the journal's line."""
        self.deployment(namespace, deployment)
        line = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "action": "restart",
            "namespace": namespace,
            "deployment": deployment,
            "idempotency_key": idempotency_key,
        }
        with self._journal.open("a") as journal:
            journal.write(json.dumps(line) + "\n")
        restarts = len(self.journal())
        pods = self._read("pods.json")
        self._write("pods.json", [_renewed(p, restarts) if p["app"] == deployment else p for p in pods])
        return line

    def worsen(self, deployment: str) -> None:
        """The incident goes on: the deployment's first pod runs out of memory again."""
        pods = self._read("pods.json")
        pod = next(p for p in pods if p["app"] == deployment)
        source = next(s for s in _read(_SHIPPED / "pods.json") if s["app"] == deployment)
        pod.update(ready=False, restartCount=2, lastState=source["lastState"])
        shutil.copy(_SHIPPED / "logs" / f"{source['name']}.txt", self.folder / "logs" / f"{pod['name']}.txt")
        self._write("pods.json", pods)

    def journal(self) -> list[Record]:
        if not self._journal.exists():
            return []
        return [json.loads(line) for line in self._journal.read_text().splitlines()]

    @property
    def _journal(self) -> Path:
        return self.folder / "journal.jsonl"

    def _read(self, name: str) -> Any:
        return _read(self.folder / name)

    def _write(self, name: str, value: Any) -> None:
        temporary = self.folder / f".{name}"
        temporary.write_text(json.dumps(value, indent=2))
        temporary.replace(self.folder / name)


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _renewed(pod: Record, restarts: int) -> Record:
    name = f"{pod['name'].rsplit('-', 1)[0]}-r{restarts}{pod['name'][-3:]}"
    return {**pod, "name": name, "ready": True, "restartCount": 0, "lastState": {}}
