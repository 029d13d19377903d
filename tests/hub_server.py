"""A Hugging Face Hub in memory, on a port of this machine: as much of its protocol as a push and a load need.

Small files arrive inside the commit. Large ones (*.safetensors) arrive before it, through git LFS' batch API or through
Xet storage, whichever the client speaks. Faults can be ordered: an error status, a dropped connection, silence.
"""

import base64
import hashlib
import json
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

USER = "tester"
XET_TOKEN = "xet-token"


@dataclass
class Request:
    method: str
    path: str
    authorization: str | None


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1("".join(self.commits).encode()).hexdigest()


@dataclass
class Fault:
    method: str  # a request's method and path must contain these
    path: str
    status: int | None  # None: the connection is dropped without an answer
    stalls: bool = False  # nothing is answered until the server closes


class HubServer(ThreadingHTTPServer):
    """Use as a context manager; `url` is what HF_ENDPOINT should be."""

    daemon_threads = True

    def __init__(self, token: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.token = token
        self.requests: list[Request] = []
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}  # by SHA-256, until a commit names them
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.closing = threading.Event()

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()

    def fail_next(self, times: int, status: int, path: str = "", method: str = "") -> None:
        self.faults += [Fault(method, path, status)] * times

    def drop_next(self, times: int, path: str = "", method: str = "") -> None:
        self.faults += [Fault(method, path, None)] * times

    def stall_next(self, times: int, path: str = "", method: str = "") -> None:
        self.faults += [Fault(method, path, None, stalls=True)] * times

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.method in method and fault.path in path:
                    self.faults.remove(fault)
                    return fault
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def handle_request(self) -> None:
        body = self.read_body()
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization")
        self.server.requests.append(Request(self.command, path, authorization))
        if fault := self.server.take_fault(self.command, path):
            self.fail(fault)
        elif path.startswith(("/v1/", "/v2/")):
            self.answer_xet(path, body)
        elif path.startswith("/lfs/"):
            self.store_large(body)
            self.answer(200)
        elif authorization not in (None, f"Bearer {self.server.token}"):
            self.answer(401, {"error": "Invalid username or password."})
        elif authorization is None and self.command == "POST":
            self.answer(401, {"error": "Log in first."})
        else:
            self.route(path, body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def log_message(self, *arguments: object) -> None:
        """The tests read `requests`; the terminal stays theirs."""

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def fail(self, fault: Fault) -> None:
        if fault.status is not None:
            # A page, as proxies answer with, and not the Hub's JSON.
            self.answer(fault.status, b"<html>error</html>")
            return
        if fault.stalls:
            self.server.closing.wait()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def answer(self, status: int, content: object = b"", headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def route(self, path: str, body: bytes) -> None:
        routes = {
            r"GET /api/whoami-v2": self.whoami,
            r"POST /api/repos/create": self.create_repo,
            r"POST /api/validate-yaml": self.validate_yaml,
            r"POST /api/models/(.+)/preupload/main": self.preupload,
            r"POST /api/models/(.+)/commit/main": self.commit,
            r"POST /(.+)\.git/info/lfs/objects/batch": self.lfs_batch,
            r"GET /api/models/(.+)/xet-write-token/main": self.xet_write_token,
            r"GET /api/models/(.+)/tree/[^/]+": self.tree,
            r"GET /api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?": self.model_info,
            r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/[^/]+/(.+)": self.resolve,
        }
        for pattern, handle in routes.items():
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                repo_id = next(iter(match.groups()), None)
                if repo_id is not None and repo_id not in self.server.repositories:
                    self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
                else:
                    handle(body, *match.groups())
                return
        self.answer(404, {"error": f"Not part of this Hub: {self.command} {path}"})

    def whoami(self, body: bytes) -> None:
        self.answer(200, {"type": "user", "name": USER, "orgs": []})

    def create_repo(self, body: bytes) -> None:
        wanted = json.loads(body)
        repo_id = f"{wanted['organization'] or USER}/{wanted['name']}"
        exists = repo_id in self.server.repositories
        if not exists:
            self.server.repositories[repo_id] = Repository(private=wanted.get("visibility") == "private")
        self.answer(409 if exists else 200, {"url": f"{self.server.url}/{repo_id}", "name": repo_id})

    def validate_yaml(self, body: bytes) -> None:
        front_matter = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
        valid = front_matter is not None and isinstance(yaml.safe_load(front_matter[1]), dict)
        self.answer(200 if valid else 400, {} if valid else {"errors": [{"message": "no metadata"}]})

    def preupload(self, body: bytes, repo_id: str) -> None:
        stored = self.server.repositories[repo_id].files
        answers = []
        for file in json.loads(body)["files"]:
            mode = "lfs" if is_large(file["path"]) else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
            if file["path"] in stored:
                answers[-1]["oid"] = oid(file["path"], stored[file["path"]])
        self.answer(200, {"files": answers})

    def lfs_batch(self, body: bytes, repo_id: str) -> None:
        objects = [
            {**wanted, "actions": {"upload": {"href": f"{self.server.url}/lfs/{wanted['oid']}"}}}
            for wanted in json.loads(body)["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def xet_write_token(self, body: bytes, repo_id: str) -> None:
        token = {"casUrl": self.server.url, "accessToken": XET_TOKEN, "exp": int(time.time()) + 3600}
        self.answer(200, token)

    def answer_xet(self, path: str, body: bytes) -> None:
        """Without the queries and grants of version 2 the client falls back to the plain uploads of version 1."""
        if path.startswith("/v1/xorbs/"):
            self.store_large(unpack_xorb(body))
            self.answer(200, {"was_inserted": True})
        elif path == "/v1/shards":
            self.answer(200, {"result": 1})
        else:
            self.answer(404)

    def store_large(self, content: bytes) -> None:
        self.server.large[hashlib.sha256(content).hexdigest()] = content

    def commit(self, body: bytes, repo_id: str) -> None:
        repository = self.server.repositories[repo_id]
        lines = [json.loads(line) for line in body.splitlines()]
        files = {}
        for value in (line["value"] for line in lines if line["key"] in ("file", "lfsFile")):
            large = self.server.large.get(value.get("oid"))
            if "oid" in value and large is None:
                self.answer(400, {"error": f"{value['path']} was never uploaded"})
                return
            files[value["path"]] = base64.b64decode(value["content"]) if large is None else large
        repository.files.update(files)
        repository.commits.append(lines[0]["value"]["summary"])
        commit_url = f"{self.server.url}/{repo_id}/commit/{repository.sha}"
        self.answer(200, {"commitUrl": commit_url, "commitOid": repository.sha, "success": True})

    def model_info(self, body: bytes, repo_id: str) -> None:
        repository = self.server.repositories[repo_id]
        siblings = [{"rfilename": path} for path in repository.files]
        self.answer(200, {"id": repo_id, "sha": repository.sha, "private": repository.private, "siblings": siblings})

    def tree(self, body: bytes, repo_id: str) -> None:
        files = self.server.repositories[repo_id].files
        self.answer(
            200,
            [{"type": "file", "path": path, "size": len(data), "oid": oid(path, data)} for path, data in files.items()],
        )

    def resolve(self, body: bytes, repo_id: str, path: str) -> None:
        repository = self.server.repositories[repo_id]
        if path not in repository.files:
            self.answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        content = repository.files[path]
        self.answer(200, content, {"ETag": f'"{oid(path, content)}"', "X-Repo-Commit": repository.sha})


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def oid(path: str, content: bytes) -> str:
    """How the Hub names a file's content: as git does, and large files by their SHA-256."""
    if is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def unpack_xorb(xorb: bytes) -> bytes:
    """The chunks of one Xet block, joined: headers of version, stored size, compression and size stand between them.

    Compressed chunks are not unpacked: upload what does not compress.
    """
    content, position = b"", 0
    while position < len(xorb):
        size = int.from_bytes(xorb[position + 1 : position + 4], "little")
        content += xorb[position + 8 : position + 8 + size]
        position += 8 + size
    return content
