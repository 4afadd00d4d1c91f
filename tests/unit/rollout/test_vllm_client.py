"""The client of a vLLM server against an HTTP server: the requests that wait when one fails."""

import doctest
import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gspo.rollout.engines import vllm_base
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.vllm_base import reach
from gspo.rollout.engines.vllm_client import VLLMServerClient

SECONDS = 60  # a request that nobody aborts


class Handler(BaseHTTPRequestHandler):
    """Answers a request of token 0 with a failure, and others only after /abort_requests."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = 200
        if self.path == "/abort_requests":
            self.server.aborted.set()
        elif body["token_ids"] == [0]:
            self.server.waiting.wait(SECONDS)
            status = 500
        else:
            self.server.waiting.set()
            self.server.aborted.wait(SECONDS)
            status = 500
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.aborted = threading.Event()
    server.waiting = threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    yield server
    server.aborted.set()
    server.shutdown()
    thread.join()
    server.server_close()


def client_of(server) -> VLLMServerClient:
    return VLLMServerClient(f"http://127.0.0.1:{server.server_port}", routes=False)


def test_a_request_that_fails_ends_the_others(server):
    with pytest.raises(EngineEnded, match="has failed: 500"):
        client_of(server).generate([[1], [0], [2]], [{}] * 3)
    assert server.aborted.is_set()


def test_ctrl_c_ends_the_requests(server):
    def interrupt():
        server.waiting.wait(SECONDS)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    # another test of this process may have left a handler of its own
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            client_of(server).generate([[1], [2]], [{}] * 2)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert server.aborted.is_set()


def test_a_stop_string_that_reaches_into_a_word_that_the_text_leaves_out():
    assert doctest.testmod(vllm_base).failed == 0
    inside = ["p", "<pad>", "x<pad>y", "<", "d> ", "\n<p"]
    assert [string for string in inside if not reach(string, "<pad>")] == []
    outside = ["ab", "</answer>x", "\n\n", "dap"]
    assert [string for string in outside if reach(string, "<pad>")] == []


def test_nothing_to_ask_for(server):
    client = client_of(server)
    assert client.generate([], []) == [] and client.prompt_logprobs([]) == []
