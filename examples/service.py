"""A translation service: POST lines of text, get a JSON list with an object for each.

    python examples/service.py .demo/bundle 8000
    curl --data-binary 'forty-two' localhost:8000      # [{"text": "zweiundvierzig", "score": -0.01}]

For production, use `tformer serve`: it shares steps between requests and limits them. This program shows the Python API
inside a server of your own: every request has a thread of its own, and all of them share one translator.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tformer_deploy

MOST_BYTES = 1 << 20


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    translator: tformer_deploy.Translator

    def do_POST(self) -> None:
        """Translate the body, a sentence a line."""
        size = int(self.headers.get("Content-Length") or 0)
        if size < 0:
            return self.answer(400, {"error": "Content-Length must not be negative"})
        if size > MOST_BYTES:
            for start in range(0, size, MOST_BYTES):  # clients read the answer once all of the request is sent
                self.rfile.read(min(MOST_BYTES, size - start))
            return self.answer(413, {"error": f"{size} bytes: send at most {MOST_BYTES}"})
        try:
            lines = self.rfile.read(size).decode("utf-8").splitlines()
            results = self.translator.translate(lines)
        except tformer_deploy.EngineError as error:  # the runtime failed
            return self.answer(500, {"error": str(error)})
        except (UnicodeDecodeError, tformer_deploy.TformerError) as error:  # such as a line longer than the model takes
            return self.answer(400, {"error": str(error)})
        self.answer(200, [{"text": result.text, "score": result.score} for result in results])

    def answer(self, status: int, content: object) -> None:
        """Send JSON."""
        body = json.dumps(content, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    bundle, port = sys.argv[1:]
    with tformer_deploy.load(bundle, beams=4) as Handler.translator:
        server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
