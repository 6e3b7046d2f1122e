"""Public task files are downloaded whole or not at all."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import evaluate
from nanoladder.evaluation import PUBLIC
from nanoladder.evaluation.download import Public

CONTENT = b'{"text": "a b"}\n' * 10_000


@pytest.fixture
def server():
    """A server on loopback: /whole serves CONTENT, /other as much of something else, /short ends early, else 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = {"/whole": CONTENT, "/other": b"x" * len(CONTENT), "/short": CONTENT[:99]}.get(self.path)
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", len(CONTENT) if body else 0)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def publish(monkeypatch, tmp_path):
    """publish(url) -> the path at which the task "lambada" is then to be, downloaded from that url."""

    def put(url):
        path = tmp_path / "lambada" / "test.jsonl"
        public = Public(url, path, hashlib.sha256(CONTENT).hexdigest())
        monkeypatch.setitem(PUBLIC, "lambada", public)
        return path

    return put


def test_a_file_is_downloaded_whole(server, publish, run_main):
    path = publish(f"{server}/whole")
    result = run_main(evaluate.main, "--download", "lambada")
    assert (result.code, result.err) == (0, "") and str(path) in result.out and "--tasks lambada" in result.out
    assert path.read_bytes() == CONTENT and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "page, reason", [("other", "is not the file"), ("short", "is not the file"), ("missing", "Not Found")]
)
def test_another_file_is_refused_and_an_older_copy_stays(page, reason, server, publish, refused):
    path = publish(f"{server}/{page}")
    path.parent.mkdir()
    path.write_bytes(b"mine")
    line = refused(evaluate.main, "--download", "lambada")
    assert reason in line and f"{server}/{page}" in line and str(path) in line
    assert list(path.parent.iterdir()) == [path] and path.read_bytes() == b"mine"


def test_without_network_one_line_says_which_file_to_put_where(publish, refused):
    path = publish("http://127.0.0.1:9/lambada.jsonl")
    line = refused(evaluate.main, "--download", "lambada")
    assert "Connection refused" in line and f"save http://127.0.0.1:9/lambada.jsonl as {path}" in line


def test_an_unknown_name_is_refused(refused):
    assert "expected hellaswag or lambada" in refused(evaluate.main, "--download", "mmlu")
