"""The Hub without the Hub: its cache as folders, and a small server that speaks its API.

The server runs on loopback and is asked by the real huggingface_hub client, in processes of their
own with HF_ENDPOINT set; nothing of that client is replaced.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from tests.support.ports import free_port

from engram import push

TOKEN = "hf_ann"


def cached(cache: Path, repo: str, files: Mapping[str, bytes], *refs: str) -> str:
    """Put a commit of a repository into a cache laid out as the Hub's; gives its hash."""
    place = cache / f"models--{repo.replace('/', '--')}"
    whole = b"".join(name.encode() + files[name] for name in sorted(files))
    commit = hashlib.sha1(whole).hexdigest()
    snapshot = place / "snapshots" / commit
    for folder in (place / "blobs", place / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        blob = place / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).unlink(missing_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    for ref in refs or ("main",):
        (place / "refs" / ref).write_text(commit)
    return commit


def in_cache(folder: Path, *sources: str, repo: str = "ann/garden") -> str:
    """Put what a push would send into the cache in a folder, as a download leaves it."""
    return cached(folder / "cache", repo, push(list(sources), repo, dry_run=True).files)


class LocalHub:
    """Repositories in memory: commits by hash, branches by name, and every request that came."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}  # repo -> hash -> files
        self.branches: dict[str, dict[str, str]] = {}
        self.messages: list[str] = []
        self.visibility: dict[str, str | None] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        return self.commits[repo][self.branches[repo][branch]]

    def commit(self, repo: str, branch: str, files: dict[str, bytes], message: str) -> str:
        whole = f"{len(self.messages)}{sorted(files)}{message}".encode()
        sha = hashlib.sha1(whole).hexdigest()
        self.commits.setdefault(repo, {})[sha] = files
        self.branches.setdefault(repo, {})[branch] = sha
        self.messages.append(message)
        return sha

    @contextmanager
    def running(self, port: int) -> Iterator[None]:
        """Serve on a port of this machine."""
        hub = self

        class Bound(_Handler):
            store = hub

        server = ThreadingHTTPServer(("127.0.0.1", port), Bound)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    store: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, code: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        headers.setdefault("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.store.requests.append(f"{self.command} {path}")
        self.body = self._body()
        if self.command in ("POST", "PUT"):
            if self.headers.get("Authorization") != f"Bearer {TOKEN}" and "/lfs/" not in path:
                return self.answer(401, {"error": "Invalid credentials"})
            return self.write(path)
        return self.read(path)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def write(self, path: str) -> None:
        store = self.store
        address = f"http://{self.headers['Host']}"
        if match := re.fullmatch(r"/lfs/([0-9a-f]{64})", path):
            assert hashlib.sha256(self.body).hexdigest() == match[1]
            store.blobs[match[1]] = self.body
            return self.answer(200)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            return self.take_commit(match[1], match[2], address)
        request = json.loads(self.body or b"{}")
        if path == "/api/repos/create":
            repo = f"{request['organization']}/{request['name']}"
            if request["organization"] != "ann":
                return self.answer(403, {"error": "You may not write there"})
            if repo in store.branches:
                return self.answer(409, {"url": f"{address}/{repo}", "error": "exists"})
            store.visibility[repo] = request.get("visibility")
            store.commit(repo, "main", {".gitattributes": b""}, "initial commit")
            return self.answer(200, {"url": f"{address}/{repo}"})
        if path == "/api/validate-yaml":
            front = yaml.safe_load(request["content"].split("---")[1])
            return self.answer(200 if front else 400, {"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in request["files"]
            ]
            return self.answer(200, {"files": modes})
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            objects = [
                {**wanted, "actions": {"upload": {"href": f"{address}/lfs/{wanted['oid']}"}}}
                for wanted in request["objects"]
            ]
            return self.answer(200, {"objects": objects, "transfer": "basic"})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            branches = store.branches[match[1]]
            if match[2] in branches:
                return self.answer(409, {"error": "exists"})
            branches[match[2]] = branches["main"]
            return self.answer(200, {})
        return self.answer(404, {"error": f"unknown {path}"})

    def take_commit(self, repo: str, branch: str, address: str) -> None:
        store = self.store
        files, message = dict(store.files(repo, branch)), ""
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = store.blobs[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        sha = store.commit(repo, branch, files, message)
        self.answer(200, {"commitUrl": f"{address}/{repo}/commit/{sha}", "commitOid": sha})

    def read(self, path: str) -> None:
        store = self.store
        if path == "/api/whoami-v2":
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return self.answer(200 if known else 401, {"name": "ann"} if known else {"error": "no"})
        match = re.fullmatch(
            r"(?:/api/models)?/([^/]+/[^/]+?)(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?", path
        )
        if match is None or match[1] not in store.branches:
            return self.answer(404, {"error": "not found"}, X_Error_Code="RepoNotFound")
        repo, what, revision, name = match.groups()
        sha = store.branches[repo].get(revision or "main", revision)
        if sha not in store.commits[repo]:
            return self.answer(404, {"error": "no"}, X_Error_Code="RevisionNotFound")
        files = store.commits[repo][sha]
        if what == "resolve":
            if name not in files:
                return self.answer(404, {"error": "no"}, X_Error_Code="EntryNotFound")
            etag = hashlib.sha256(files[name]).hexdigest()
            return self.answer(
                200, files[name], ETag=f'"{etag}"', X_Repo_Commit=sha,
                Content_Length=str(len(files[name])),
            )  # fmt: skip
        if what == "tree":
            listed = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                for n, d in files.items()
            ]
            return self.answer(200, listed)
        siblings = [{"rfilename": n} for n in files]
        return self.answer(200, {"id": repo, "sha": sha, "siblings": siblings, "tags": []})


_CLIENT = """
import json, os, sys, traceback
import engram
from engram import MemoryViT, load_backbone, pull, push
from engram.store.remote import list_engrams
from huggingface_hub import constants
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(job["cwd"])
        os.environ.update({"HF_TOKEN": job["token"]} if job["token"] else {})
        constants.HF_HUB_CACHE = job["cache"]
        scope = {}
        try:
            exec(job["script"], scope)
            answer = {"out": scope["out"]}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with open(job["answer"], "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.waitpid(child, 0)
    print("done", flush=True)
"""


class HubClient:
    """Runs scripts in processes of their own, in which huggingface_hub has a local endpoint.

    It reads the endpoint once, when it is imported; so one interpreter imports it with the endpoint
    of this client, and forks for every script.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        env |= {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1"}
        env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
        env |= {"no_proxy": "127.0.0.1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def run(self, script: str, cwd: Path, token: str | None = TOKEN) -> Any:
        """What the script leaves in `out`. Its cache is a folder in `cwd`."""
        answer = self.folder / "answer.json"
        job = {"script": script, "cwd": str(cwd), "token": token, "answer": str(answer)}
        job["cache"] = str(cwd / "client-cache")
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"
        found = json.loads(answer.read_text())
        assert "error" not in found, found["error"]
        return found["out"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
