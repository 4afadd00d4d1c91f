"""A stand-in for W&B's server, which cannot be reached from a test. The client, its transport and
what it sends are the real ones; this keeps what it is sent (projects, runs with their rows and
files, views) and gives it back."""

import gzip
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "a" * 40
USER = {
    "id": "u",
    "entity": "team",
    "username": "me",
    "email": "me@here",
    "flags": "{}",
    "teams": {"edges": []},
}
ONE_PAGE = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}


@dataclass
class SavedRun:
    """A run as the client sent it: history rows by their number, uploaded files by name."""

    name: str
    about: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    rows: dict[int, dict] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    summary: dict = field(default_factory=dict)
    ended: bool = False
    preempting: bool = False


class Server(ThreadingHTTPServer):
    """`views` by name, `sent`: the variables of every upsert of a view; `runs` by id; `projects`:
    names that exist.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.views, self.sent, self.projects, self.refuses = {}, [], [], False
        self.runs: dict[str, SavedRun] = {}
        self.unknown, self.scanned = [], []
        # its configuration; what its agent is told; what it said
        self.sweep, self.commands, self.states = {}, [], []
        self.artifacts: list[str] = []
        self.stops = False  # whether runs are asked to stop, as by a sweep's early termination
        self.made: list[dict] = []  # every artifact that a run has written, and by id what it is
        self.used: list[tuple[str, str]] = []  # of every use: the run and the artifact's name

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": self.address, "WANDB_API_KEY": KEY}

    def answer(self, query: str, variables: dict) -> dict:
        operation = re.search(r"(?:query|mutation)\s+(\w+)", query)[1].lower()
        known = getattr(self, f"on_{operation}", None)
        if known is None:
            self.unknown.append((operation, " ".join(query.split()), variables))
            return {"errors": [{"message": f"the stand-in does not know {operation}"}]}
        return {"data": known(variables)}

    def on_viewer(self, _):
        return {"viewer": USER}

    on_getdefaultentity = on_viewer

    # projects
    def on_getprojects(self, _):
        return {"models": self._page(self._project(name) for name in self.projects)}

    def on_upsertmodel(self, variables):
        name = variables["input"]["name"]
        self.projects.append(name)
        return {
            "upsertModel": {
                "project": self._project(name),
                "model": {"name": name},
                "inserted": True,
            }
        }

    on_createproject = on_upsertmodel

    def _project(self, name: str) -> dict:
        about = {
            "id": f"P-{name}",
            "name": name,
            "entityName": "team",
            "createdAt": "2026-01-01T00:00:00",
        }
        return {
            "__typename": "Project",
            **about,
            "internalId": "1",
            "isBenchmark": False,
            "user": None,
        }

    def _page(self, nodes) -> dict:
        return {"edges": [{"node": node, "cursor": "c"} for node in nodes], "pageInfo": ONE_PAGE}

    # views
    def on_upsertview2(self, variables):
        if self.refuses:
            raise PermissionError
        self.sent.append(variables)
        same = [view for view in self.views.values() if variables.get("id") in (view["id"],)]
        view = (
            same[0]
            if same
            else self.views.setdefault(variables["name"], {"id": f"V{len(self.views)}"})
        )
        view |= {
            key: variables.get(key)
            for key in ("displayName", "spec", "name", "type", "description")
        }
        view |= {
            "project": {
                "id": "P",
                "name": variables["projectName"],
                "entityName": variables["entityName"],
            }
        }
        return {"upsertView": {"view": view, "inserted": not variables.get("id")}}

    on_upsertview = on_upsertview2

    def on_projectviews(self, variables):
        about = {
            "user": USER | {"photoUrl": ""},
            "updatedAt": "2026-01-01T00:00:00",
            "createdAt": "2026-01-01T00:00:00",
        }
        views = [
            view | about
            for view in self.views.values()
            if view["type"] == variables.get("viewType", "runs")
        ]
        return {"project": {"allViews": self._page(views)}}

    def on_projectinternalid(self, _):
        return {"project": {"internalId": "UHJvamVjdDox"}}

    def on_view(self, variables):
        found = [self.views[variables["viewName"]]] if variables["viewName"] in self.views else []
        return {"project": {"allViews": {"edges": [{"node": node} for node in found]}}}

    # runs
    def on_upsertbucket(self, variables):
        new = variables["name"] not in self.runs
        run = self.runs.setdefault(variables["name"], SavedRun(variables["name"]))
        run.about |= {key: value for key, value in variables.items() if value is not None}
        run.config |= json.loads(variables.get("config") or "{}")
        if variables["project"] not in self.projects:
            self.projects.append(variables["project"])
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": new}}

    def on_runresumestatus(self, variables):
        run = self.runs.get(variables["name"])
        found = None
        if run:
            counts = {"historyLineCount": len(run.rows), "logLineCount": 0, "eventsLineCount": 0}
            last = [json.dumps(run.rows[max(run.rows)])] if run.rows else []
            tails = {
                "historyTail": json.dumps(last),
                "eventsTail": "[]",
                "summaryMetrics": json.dumps(run.summary),
            }
            # says that it has begun
            client = {"wandbConfig": json.dumps({"t": run.config["_wandb"]["value"]["t"]})}
            about = {"tags": [], "notes": "", "config": json.dumps(run.config)}
            found = self._bucket(run) | counts | tails | client | about
        return {
            "model": {
                "id": "P",
                "name": variables["project"],
                "entity": {"id": "E", "name": "team"},
                "bucket": found,
            }
        }

    def on_runs(self, variables):
        wanted = json.loads(variables.get("filters") or "{}")
        asked = [
            run
            for run in self.runs.values()
            if wanted.get("group") in (None, run.about.get("groupName"))
            and wanted.get("name") in (None, run.name)
        ]
        page = {"internalId": "1", "runCount": len(asked), "readOnly": False}
        return {"project": page | {"runs": self._page(self._run(run) for run in asked)}}

    def on_runhistorykeys(self, variables):
        run = self.runs[variables["name"]]
        keys = {
            "lastStep": max((row["_step"] for row in run.rows.values()), default=-1),
            "keys": {},
            "sets": [],
        }
        return {"project": {"run": {"historyKeys": keys}}}

    def on_runparquethistory(self, _):
        return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": []}}}}

    def on_historypage(self, variables):
        rows = [
            self.runs[variables["run"]].rows[number]
            for number in sorted(self.runs[variables["run"]].rows)
        ]
        self.scanned.append((variables["minStep"], variables["maxStep"]))
        asked = [row for row in rows if variables["minStep"] <= row["_step"] < variables["maxStep"]]
        return {
            "project": {
                "run": {"history": [json.dumps(row) for row in asked[: variables["pageSize"]]]}
            }
        }

    def on_run(self, variables):
        return {"project": {"internalId": "1", "run": self._run(self.runs[variables["name"]])}}

    def _run(self, run: SavedRun) -> dict:
        about = {
            key: run.about.get(key)
            for key in ("displayName", "sweepName", "jobType", "commit", "notes")
        }
        state = {
            "state": "finished" if run.ended else "running",
            "group": run.about.get("groupName"),
        }
        texts = {
            "config": json.dumps(run.config),
            "summaryMetrics": "{}",
            "systemMetrics": "{}",
            "description": "",
        }
        when = {
            "createdAt": "2026-01-01T00:00:00Z",
            "heartbeatAt": "2026-01-01T00:00:00Z",
            "readOnly": False,
        }
        user = {
            "user": {"name": "me", "username": "me"},
            "projectId": "1",
            "tags": run.about.get("tags") or [],
        }
        named = {"id": f"R-{run.name}", "name": run.name, "historyLineCount": len(run.rows)}
        return named | about | state | texts | when | user

    def on_createrunfiles(self, variables):
        at = f"{self.address}/upload/{variables['run']}"
        files = [{"name": name, "uploadUrl": f"{at}/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}

    # sweeps: what an agent asks for; each heartbeat answers with the next command
    def on_sweepwithruns(self, variables):
        about = {
            "id": "S",
            "name": variables["sweep"],
            "method": "grid",
            "state": "RUNNING",
            "runs": {"edges": []},
        }
        return {"project": {"sweep": about | {"config": json.dumps(self.sweep)}}}

    def on_createagent(self, _):
        return {"createAgent": {"agent": {"id": "A"}}}

    def on_heartbeat(self, variables):
        self.states.append(json.loads(variables["runState"]))
        busy = bool(self.states[-1])
        told = [] if busy else [self.commands.pop(0)()] if self.commands else [{"type": "exit"}]
        return {"agentHeartbeat": {"agent": {"id": "A"}, "commands": json.dumps(told)}}

    # artifacts: known to be there, so that nothing is uploaded again
    def on_createartifact(self, variables):
        if self.refuses:
            raise PermissionError
        self.made.append(variables["input"])
        self.artifacts.append(variables["input"]["artifactCollectionName"])
        made = {
            "id": f"F{len(self.artifacts)}",
            "state": "COMMITTED",
            "artifactSequence": {"latestArtifact": None},
        }
        return {"createArtifact": {"artifact": made}}

    def on_useartifact(self, variables):
        used = variables["input"]
        name = self.artifacts[int(used["artifactID"].removeprefix("F")) - 1]
        self.used.append((used["runName"], name))
        return {"useArtifact": {"artifact": {"id": used["artifactID"]}}}

    def on_organizationcoreweaveorganizationid(self, _):
        return {"entity": {"organization": None}}

    def _bucket(self, run: SavedRun) -> dict:
        project = {"id": "P", "name": run.about["project"], "entity": {"id": "E", "name": "team"}}
        shown = {
            "displayName": run.about.get("displayName", run.name),
            "description": "",
            "sweepName": None,
        }
        lines = {"historyLineCount": len(run.rows)}
        return {
            "id": f"R-{run.name}",
            "name": run.name,
            "config": "{}",
            "project": project,
            **shown,
            **lines,
        }

    def streamed(self, run: str, sent: dict) -> None:
        """A part of a run's rows, as the client streams them while it runs."""
        saved = self.runs[run]
        for name, part in sent.get("files", {}).items():
            if name == "wandb-history.jsonl":
                rows = [json.loads(line) for line in part["content"]]
                saved.rows |= {part["offset"] + number: row for number, row in enumerate(rows)}
            if name == "wandb-summary.json":
                saved.summary = json.loads(part["content"][-1])
        saved.ended |= bool(sent.get("complete"))
        saved.preempting |= bool(sent.get("preempting"))


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.body()
        stream = re.match(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path)
        if stream:
            self.server.streamed(stream[1], json.loads(body))
            return self.reply(
                200, json.dumps({"stopped": True} if self.server.stops else {}).encode()
            )
        if self.path != "/graphql":
            return self.reply(404, b"{}")
        question = json.loads(body)
        try:
            answer = self.server.answer(question["query"], question.get("variables") or {})
        except PermissionError:
            answer = {"errors": [{"message": "permission denied"}]}
        except AttributeError as error:  # a test has taken something away
            answer = {"errors": [{"message": f"server error: {error}"}]}
        self.reply(200, json.dumps(answer).encode())

    def do_PUT(self):
        _, _, run, name = self.path.split("/", 3)
        self.server.runs[run].files[name] = self.body()
        self.reply(200, b"")

    def do_GET(self):
        self.server.unknown.append(("GET", self.path, {}))
        self.reply(404, b"")

    def body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

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
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
