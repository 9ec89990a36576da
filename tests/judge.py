"""A reward server as a user may write it: it listens where its environment says, and wants its key."""

from __future__ import annotations

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Judge(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(200 if self.path == "/health" else 404, b"")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {os.environ['SERVICE_KEY']}":
            self.answer(401, b"who are you?")
            return
        rewards = [float(len(one["text"]) % 2) for one in asked["completions"]]
        self.answer(200, json.dumps({"rewards": rewards}).encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    where = (os.environ["SERVICE_HOST"], int(os.environ["SERVICE_PORT"]))
    if mark := os.environ.get("JUDGE_STARTS"):
        with Path(mark).open("a") as file:
            file.write(f"{os.getpid()} {os.uname().nodename}\n")
    print("judge listens at", *where, flush=True)
    ThreadingHTTPServer(where, Judge).serve_forever()


if __name__ == "__main__":
    main()
