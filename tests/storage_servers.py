"""Servers that answer as buckets do, and fail on request."""

import contextlib
import itertools
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest
from helpers import ROOT, free_port, listens, wait_for


class Faulty(BaseHTTPRequestHandler):
    """Of a proxy to the server at port `behind`. Its `fault()` says what is wrong with a request: a status that is
    answered instead, "reset", "half" of the answer, "late": done behind, without an answer, "hang": nothing for a
    while; or None."""

    protocol_version = "HTTP/1.1"  # clients wait for its "100 Continue"
    disable_nagle_algorithm = True  # with it every answer takes 40 ms

    def handle(self):
        with contextlib.suppress(OSError):  # the client has gone
            super().handle()

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault()
        self.server.failed += fault is not None
        if fault == "hang":
            time.sleep(5)
        if fault in ("hang", "reset"):
            return self.hang_up()
        done = (fault, {}, b"") if isinstance(fault, int) else self.behind(body)
        if fault == "late":
            return self.hang_up()
        self.send(*done, half=fault == "half")

    def behind(self, body):
        """(status, headers, content) of the server's answer."""
        connection = HTTPConnection("127.0.0.1", self.server.behind)
        connection.request(self.command, self.path, body, dict(self.headers))
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()

    def send(self, status, headers, content, half=False):
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if half and content:
            self.wfile.write(content[: len(content) // 2])
            return self.hang_up()
        self.wfile.write(content)

    def hang_up(self):
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = answer


def every_third(proxy):
    """A `fault` of the proxy: every third request is answered with 503, `proxy.most` times."""
    requests = itertools.count(1)

    def fault():
        return 503 if next(requests) % 3 == 0 and proxy.failed < proxy.most else None

    return fault


@contextlib.contextmanager
def storage_server(kind):
    """(a proxy to an emulator of gs or s3 with a bucket "bucket", where every third request fails; the file system of
    that past the proxy; the environment by which clients find the proxy)."""
    package = dict(gs="gcp_storage_emulator", s3="moto.server")[kind]
    pytest.importorskip(package, reason="bash setup_tpu.sh test")
    port = free_port()
    servers = dict(gs=[ROOT / "tests/gcs_emulator.py", port, "bucket"])
    servers["s3"] = ["-m", "moto.server", "-p", port]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = subprocess.Popen([sys.executable, *map(str, servers[kind])], **quiet)
    try:
        wait_for(lambda: listens("127.0.0.1", port))
        proxy, url = ThreadingHTTPServer(("127.0.0.1", 0), Faulty), f"http://127.0.0.1:{port}"
        proxy.behind, proxy.failed, proxy.most = port, 0, 9**9
        proxy.fault = every_third(proxy)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{proxy.server_port}"
        if kind == "gs":
            env = dict.fromkeys(("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), address)
            env["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "x"
        else:
            env = dict(AWS_ENDPOINT_URL=address, AWS_DEFAULT_REGION="us-east-1")
            env |= dict(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x")
        fsspec.get_filesystem_class(kind).clear_instance_cache()  # of another test's server
        settings = {"token": "anon"} if kind == "gs" else dict(key="x", secret="x")
        fs = fsspec.filesystem(kind, endpoint_url=url, skip_instance_cache=True, **settings)
        if kind == "s3":
            fs.mkdir("bucket")
        yield proxy, fs, env
        proxy.shutdown()
    finally:
        server.kill()
        server.wait()
