"""A stand-in for the Hub: the few HTTP routes by which huggingface_hub makes, fills and reads a model repository."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class HubStandIn(ThreadingHTTPServer):
    """Repositories in memory, each with the files of its last commit, whatever revision is asked for.

    Args:
        repositories: bytes by path by repository id.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []  # their titles

    @property
    def endpoint(self) -> str:
        """For `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.server_port}"

    def sha(self, repo_id: str) -> str:
        """The last commit of a repository: its name is what is in it."""
        return hashlib.sha1(repr(sorted(self.repositories[repo_id].items())).encode()).hexdigest()


@contextlib.contextmanager
def running_hub() -> Iterator[HubStandIn]:
    """A stand-in that answers until the block ends."""
    hub = HubStandIn()
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            repo_id = f"{asked['organization']}/{asked['name']}"
            self.server.repositories.setdefault(repo_id, {".gitattributes": b""})
            self.answer_json({"url": f"{self.server.endpoint}/{repo_id}", "name": repo_id})
        elif parts == ["api", "validate-yaml"]:
            self.answer_json({"errors": [], "warnings": []})
        elif parts[4:5] == ["preupload"]:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.answer_json({"files": files})
        elif parts[4:5] == ["commit"]:
            repo_id = "/".join(parts[2:4])
            self.commit(repo_id, [json.loads(line) for line in body.splitlines()])
            sha = self.server.sha(repo_id)
            url = f"{self.server.endpoint}/{repo_id}/commit/{sha}"
            self.answer_json({"commitUrl": url, "commitOid": sha, "success": True})
        else:
            self.answer(404)

    def commit(self, repo_id: str, operations: list[dict[str, Any]]) -> None:
        files = self.server.repositories[repo_id]
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "header":
                self.server.commits.append(value["summary"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo_id = "/".join(parts[2:4] if is_api else parts[:2])
        files = self.server.repositories.get(repo_id)
        if files is None:
            self.answer(404, {"X-Error-Code": "RepoNotFound"})
        elif is_api and parts[4:5] == ["tree"]:
            folder = "/".join(parts[6:])
            inside = [path for path in files if not folder or path.startswith(f"{folder}/")]
            if inside:
                entry = {"type": "file", "oid": "0" * 40}
                self.answer_json([{**entry, "path": path, "size": len(files[path])} for path in inside])
            else:
                self.answer(404, {"X-Error-Code": "EntryNotFound"})
        elif is_api:
            siblings = [{"rfilename": path} for path in files]
            self.answer_json({"id": repo_id, "sha": self.server.sha(repo_id), "siblings": siblings})
        elif (path := "/".join(parts[4:])) in files:
            etag = hashlib.sha1(files[path]).hexdigest()
            self.answer(200, {"ETag": f'"{etag}"', "X-Repo-Commit": self.server.sha(repo_id)}, files[path])
        else:
            self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.server.sha(repo_id)})

    def answer_json(self, value: Any) -> None:
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
