"""A scripted model behind a real endpoint on the loopback interface."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[dict[str, Any], dict[str, Any], int], object]
"""(the judged material, the whole request, how many requests came before) -> reply text or status code."""


class Served:
    """What a scripted endpoint got."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()


@contextmanager
def serve(script: Script) -> Iterator[Served]:
    """An OpenAI-compatible endpoint that answers by `script`."""
    served = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with served.lock:
                count = len(served.requests)
                served.requests.append(request)
                served.headers.append(dict(self.headers))
            reply = script(json.loads(request["messages"][-1]["content"]), request, count)
            if isinstance(reply, int):
                body, status = b"busy", reply
            elif isinstance(reply, bytes):
                body, status = reply, 200
            else:
                message = {"role": "assistant", "content": reply}
                body, status = json.dumps({"choices": [{"index": 0, "message": message}]}).encode(), 200
            self.send_response(status)
            if status in (301, 302, 307):
                self.send_header("Location", "/v1/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reply(material: dict[str, Any], meets: Callable[[str, str, str], bool]) -> str:
    """A reply of the asked shape; `meets(criterion, label, diff)` decides."""
    return json.dumps(
        {
            name: {"reason": "seen", **{k: meets(name, k, v) for k, v in material["submissions"].items()}}
            for name in material["criteria"]
        }
    )
