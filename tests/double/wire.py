"""As much HTTP as the doubles need: keep-alive requests in, whole or chunked answers out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Iterable

Answer = Callable[[str, str, bytes, asyncio.StreamWriter], Awaitable[None]]


async def follow(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer
) -> None:
    """Answer one connection's requests, ``answer(method, path, body, writer)``, until it ends."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while (line := await reader.readline()).strip():
            method, path, _ = line.decode().split(" ", 2)
            length = 0
            while (header := await reader.readline()).strip():
                name, _, value = header.decode().partition(":")
                if name.lower() == "content-length":
                    length = int(value)
            body = await reader.readexactly(length)
            await answer(method, path, body, writer)
    writer.close()


def reply(
    writer: asyncio.StreamWriter, status: int, body: object, *, kind: str = "application/json"
) -> None:
    """Write a whole answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


def event(writer: asyncio.StreamWriter, document: dict[str, object]) -> None:
    """Write one server-sent event."""
    chunk(writer, b"data: " + json.dumps(document).encode() + b"\n\n")


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write one chunk of a chunked answer."""
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def tell(lines: Iterable[str]) -> None:
    """Print to the log at once."""
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
