"""A stand-in for W&B's server, which cannot be reached from a test: it keeps views by name, as W&B's `upsertView` does,
and answers the client's other questions. The client, its transport and what it sends are the real ones."""

from __future__ import annotations

import gzip
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "a" * 40
USER = {"id": "u", "entity": "team", "username": "me", "email": "me@here", "flags": "{}", "teams": {"edges": []}}


class Server(ThreadingHTTPServer):
    """`views`: what was saved, by name; `sent`: the variables of every upsert; `projects`: names that exist."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.views, self.sent, self.projects, self.refuses = {}, [], [], False

    @property
    def environment(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": f"http://127.0.0.1:{self.server_port}", "WANDB_API_KEY": KEY}

    def answer(self, query: str, variables: dict) -> dict:
        if "upsertView" in query:
            self.sent.append(variables)
            view = self.views.setdefault(variables["name"], {"id": variables.get("id") or f"V{len(self.views)}"})
            assert view["id"] == variables.get("id", view["id"])
            view |= {"displayName": variables["displayName"], "spec": variables["spec"], "name": variables["name"]}
            return {"upsertView": {"view": view, "inserted": "id" not in variables}}
        if "allViews" in query:
            found = [self.views[variables["viewName"]]] if variables["viewName"] in self.views else []
            return {"project": {"allViews": {"edges": [{"node": node} for node in found]}}}
        if "models(" in query:
            nodes = [self._project(name) for name in self.projects]
            page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
            return {"models": {"edges": [{"node": node, "cursor": "c"} for node in nodes], "pageInfo": page}}
        if "upsertModel" in query:
            name = variables["input"]["name"]
            self.projects.append(name)
            return {"upsertModel": {"project": self._project(name), "model": {"name": name}, "inserted": True}}
        if "viewer" in query:
            return {"viewer": USER}
        raise AssertionError(f"the stand-in has no answer to {query}")

    def _project(self, name: str) -> dict:
        about = {"id": f"P-{name}", "name": name, "entityName": "team", "createdAt": "2026-01-01T00:00:00"}
        return {"__typename": "Project", **about, "internalId": "1", "isBenchmark": False, "user": None}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path != "/graphql":
            return self.reply(404, b"{}")
        question = json.loads(body)
        if self.server.refuses and "upsertView" in question["query"]:
            return self.reply(200, json.dumps({"errors": [{"message": "permission denied"}]}).encode())
        data = self.server.answer(question["query"], question.get("variables") or {})
        self.reply(200, json.dumps({"data": data}).encode())

    def do_GET(self):
        self.reply(404, b"")

    def reply(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def serving():
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
