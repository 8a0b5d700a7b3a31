"""A W&B server on this machine that knows as much as the client needs to send runs: it keeps what arrives.

Shaped after what the client asks for; how the real server treats what it gets (steps that come twice, states) is not copied.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Stored:
    """One run as it arrived. ``history`` holds the lines in the order of arrival, with the line number that each claimed."""

    project: str
    entity: str
    config: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    history: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    ends: list[tuple[int, bool]] = field(default_factory=list)
    """Exit code of each part that ended, and whether it was marked as going on."""
    preempting: bool = False

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for _, row in self.history]

    @property
    def lines(self) -> int:
        return max((number + 1 for number, _ in self.history), default=0)


class WandbServer:
    """Serves until ``close``."""

    def __init__(self) -> None:
        self.runs: dict[str, Stored] = {}
        self.operations: list[str] = []
        self.refuse_history: int | None = None
        """The HTTP status that answers history instead of taking it."""
        self.take_lines: int | None = None
        """Take so many further lines of history and refuse the rest, as a connection that breaks."""
        self.answer_always: tuple[int, Any] | None = None
        """Status and answer to everything that is posted."""
        self.lock = threading.Lock()
        outer = self

        class Handler(_Handler):
            server_state = outer

        self._http = _Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client drops connections when it ends."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: WandbServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        body = self._body()
        _, _, run, name = self.path.split("/", 3)
        with self.server_state.lock:
            self.server_state.runs[run].files[name] = body
        self._reply({})

    def do_POST(self) -> None:
        body = json.loads(self._body())
        state = self.server_state
        if state.answer_always:
            self._reply(state.answer_always[1], state.answer_always[0])
            return
        with state.lock:
            if self.path.endswith("/file_stream"):
                code, answer = self._stream(body)
            else:
                found = re.search(r"(?:query|mutation)\s+(\w+)", body["query"])
                operation = found[1] if found else ""
                state.operations.append(operation)
                code, answer = 200, self._graphql(operation, body["query"], body.get("variables") or {})
        self._reply(answer, code)

    def _stream(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        state = self.server_state
        run = state.runs[self.path.split("/")[-2]]
        history = (body.get("files") or {}).get("wandb-history.jsonl")
        if history:
            state.operations.append("history")
            if state.refuse_history:
                return state.refuse_history, {"error": "refused"}
            lines = history["content"]
            if state.take_lines is not None:
                lines = lines[: state.take_lines]
            for number, line in enumerate(lines, start=history["offset"]):
                run.history.append((number, json.loads(line)))
            if state.take_lines is not None:
                return 403, {"error": "the connection broke"}
        if summary := (body.get("files") or {}).get("wandb-summary.json"):
            run.summary = json.loads(summary["content"][-1])
        run.preempting |= bool(body.get("preempting"))
        if body.get("complete"):
            run.ends.append((body["exitcode"], run.preempting))
            run.preempting = False
        return 200, {"exitcode": None, "limits": {}}

    def _graphql(self, operation: str, query: str, given: dict[str, Any]) -> dict[str, Any]:
        data: dict[str, Any]
        if operation == "UpsertBucket":
            data = self._upsert(given)
        elif operation == "RunResumeStatus":
            data = {"model": self._resume(given)}
        elif operation == "CreateRunFiles":
            url = f"{self.server_state.url}/storage/{given['run']}/"
            files = [{"name": name, "uploadUrl": url + name} for name in given["files"]]
            data = {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
        elif operation == "Run" or "project(name" in query:
            data = {"project": self._project(given)}
        elif "viewer" in query:
            viewer = {"id": "user", "entity": "me", "username": "me", "name": "me", "email": "me@example.org"}
            data = {"viewer": viewer | {"flags": "{}", "teams": {"edges": []}}, "serverInfo": None}
        else:
            data = {"serverInfo": {"features": []}}
        return {"data": data}

    def _upsert(self, given: dict[str, Any]) -> dict[str, Any]:
        runs = self.server_state.runs
        name = given["name"]
        inserted = name not in runs
        run = runs.setdefault(
            name, Stored(given.get("project") or "uncategorized", given.get("entity") or "me")
        )
        if given.get("config"):
            run.config = json.loads(given["config"])
        run.attributes |= {k: v for k, v in given.items() if v is not None and k != "config"}
        bucket = {
            "id": f"id-{name}",
            "name": name,
            "displayName": run.attributes.get("displayName"),
            "description": None,
            "config": json.dumps(run.config),
            "sweepName": None,
            "historyLineCount": run.lines,
            "project": {"id": "p", "name": run.project, "entity": {"id": "e", "name": run.entity}},
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _resume(self, given: dict[str, Any]) -> dict[str, Any]:
        model = {"id": "m", "name": given["project"], "entity": {"id": "e", "name": "me"}, "bucket": None}
        run = self.server_state.runs.get(given["name"])
        if run is not None:
            model["bucket"] = {
                "id": f"id-{given['name']}",
                "name": given["name"],
                "displayName": run.attributes.get("displayName"),
                "sweepName": None,
                "summaryMetrics": json.dumps(run.summary),
                "historyLineCount": run.lines,
                "logLineCount": 0,
                "eventsLineCount": 0,
                "historyTail": json.dumps([json.dumps(row) for row in run.rows[-1:]]),
                "eventsTail": "[]",
                "config": json.dumps(run.config),
                "tags": run.attributes.get("tags") or [],
                "notes": run.attributes.get("notes"),
                "wandbConfig": '{"t": 1}',
            }
        return model

    def _project(self, given: dict[str, Any]) -> dict[str, Any] | None:
        name = given.get("name") or given.get("run")
        run = self.server_state.runs.get(str(name))
        if run is None:
            return {"id": "p", "internalId": "1", "run": None}
        found = {
            "id": f"id-{name}",
            "name": name,
            "displayName": run.attributes.get("displayName"),
            "state": "finished",
            "config": json.dumps(run.config),
            "summaryMetrics": json.dumps(run.summary),
            "systemMetrics": "{}",
            "historyLineCount": run.lines,
            "historyKeys": None,
            "tags": [],
            "createdAt": "2026-01-01T00:00:00",
            "heartbeatAt": None,
            "projectId": "1",
            "user": {"name": "me", "username": "me"},
        }
        return {"id": "p", "internalId": "1", "run": found}

    def _body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        return gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data

    def _reply(self, answer: Any, code: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
