"""A proxy in front of an HTTP server that spoils chosen answers, and remembers what was asked.

What a network, a load balancer or a server under way does to requests, over real sockets: the
request may have been carried out or not when its answer is lost.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

Kind = Literal["status", "reset", "lost", "cut", "slow", "nonsense"]
#: Hop by hop, or set anew here.
_OWN = frozenset(
    {"connection", "transfer-encoding", "content-length", "keep-alive", "server", "date"}
)


@dataclass
class Fault:
    """What happens to the next ``times`` requests that match.

    ``status``: answered with ``code`` and ``body`` as JSON, not carried out. ``reset``: the
    connection is reset, not carried out. ``lost``: carried out, then reset without an answer.
    ``cut``: carried out, half of the answer arrives. ``slow``: carried out, the answer waits for
    ``delay_s``. ``nonsense``: answered with 200 and a page of HTML. With ``body`` nothing is
    carried out: it is the answer.
    """

    pattern: str
    kind: Kind
    code: int = 503
    body: object = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    times: int = 1


@dataclass
class Asked:
    """One request as it arrived."""

    line: str
    authorization: str | None
    body: bytes


class Proxy:
    """Listens on a port of its own and hands requests on to ``target``."""

    def __init__(
        self, target: str, *, bind: str = "127.0.0.1", certificate: Path | None = None
    ) -> None:
        self._target = urlsplit(target)
        self.faults: list[Fault] = []
        self.asked: list[Asked] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def _answer(self) -> None:
                proxy._answer(self)

            do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _answer

            def log_message(self, *_: object) -> None:
                return

        self._server = http.server.ThreadingHTTPServer((bind, 0), Handler)
        self._server.daemon_threads = True
        scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            scheme = "https"
        self.host = f"{scheme}://{bind}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    def inject(self, pattern: str, kind: Kind, **more: object) -> None:
        """Spoil the next requests whose "METHOD /path" matches ``pattern``."""
        with self._lock:
            self.faults.append(Fault(pattern, kind, **more))  # type: ignore[arg-type]

    def answer(self, pattern: str, body: object, *, code: int = 200) -> None:
        """Answer all such requests with this, as a server would that does nothing else."""
        self.inject(pattern, "status", code=code, body=body, times=1_000_000)

    def clear(self) -> None:
        """Forget faults and what was asked."""
        with self._lock:
            self.faults.clear()
            self.asked.clear()

    def count(self, pattern: str) -> int:
        """Return how many requests matched."""
        return sum(bool(re.search(pattern, one.line)) for one in self.asked)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)

    def _take(self, line: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, line):
                    fault.times -= 1
                    return fault
        return None

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        line = f"{request.command} {request.path}"
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        fault = self._take(line)
        with self._lock:
            self.asked.append(Asked(line, request.headers.get("Authorization"), body))
        # A caller that gave up has closed its end.
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            if fault is None:
                self._send(request, *self._forward(request, body))
            else:
                self._spoil(request, body, fault)

    def _spoil(
        self, request: http.server.BaseHTTPRequestHandler, body: bytes, fault: Fault
    ) -> None:
        if fault.kind == "status":
            said = json.dumps(fault.body or {"errors": "said by the proxy"}).encode()
            headers = {"Content-Type": "application/json", **fault.headers}
            self._send(request, fault.code, headers, said)
        elif fault.kind == "nonsense":
            self._send(request, 200, {"Content-Type": "text/html"}, b"<html>please log in</html>")
        elif fault.kind == "reset":
            _reset(request)
        else:
            if fault.body is None:
                status, headers, data = self._forward(request, body)
            else:
                status, headers, data = fault.code, {}, json.dumps(fault.body).encode()
            if fault.kind == "lost":
                _reset(request)
            elif fault.kind == "cut":
                self._send(request, status, headers, data, sent=len(data) // 2)
                _reset(request)
            else:
                time.sleep(fault.delay_s)
                self._send(request, status, headers, data)

    def _forward(
        self, request: http.server.BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        there = http.client.HTTPConnection(
            str(self._target.hostname), self._target.port or 80, timeout=60
        )
        try:
            headers = {k: v for k, v in request.headers.items() if k.lower() not in _OWN}
            there.request(request.command, request.path, body=body or None, headers=headers)
            answer = there.getresponse()
            kept = {k: v for k, v in answer.getheaders() if k.lower() not in _OWN}
            return answer.status, kept, answer.read()
        except OSError:
            return 502, {}, b""
        finally:
            there.close()

    def _send(
        self,
        request: http.server.BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        data: bytes,
        *,
        sent: int | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data if sent is None else data[:sent])


def _reset(request: http.server.BaseHTTPRequestHandler) -> None:
    """Close so that the other side sees a reset, not an end."""
    request.close_connection = True
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.wfile.flush()
    request.connection.close()


@contextlib.contextmanager
def proxied(
    target: str, *, bind: str = "127.0.0.1", certificate: Path | None = None
) -> Iterator[Proxy]:
    """Run a proxy for the length of the body."""
    proxy = Proxy(target, bind=bind, certificate=certificate)
    try:
        yield proxy
    finally:
        proxy.close()


def self_signed(path: Path) -> Path:
    """Write a certificate for 127.0.0.1 with its key, in one file of PEM; returns the path."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "memsweep test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(certificate.public_bytes(pem) + private)
    return path
