"""A server of streams with known delays, for measuring load generators: ``python -m bench.load_server PORT CPU``.

As little work for each token as Python allows (one write of bytes made before), so that the generator on the other core
is what is measured. A prompt may hold ``delay=SECONDS`` and ``gap=SECONDS``. The first token's text is the time from the
request's last byte to this token's write, as the server itself has measured it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys

import uvloop

DELAY = re.compile(rb"delay=([\d.]+)")
GAP = re.compile(rb"gap=([\d.]+)")
TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(value: bytes) -> bytes:
    data = b"data: " + value + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    body = {
        "id": "chatcmpl-0123456789", "object": "chat.completion.chunk", "created": 1764500000, "model": "fake",
        "choices": [choice],
    }  # fmt: skip
    return event(json.dumps(body).encode())


TOKEN = chunk(" token")
LAST = chunk("", "length")
END = event(b"[DONE]") + b"0\r\n\r\n"


class Stream(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.buffer = transport, b""
        self.loop = asyncio.get_running_loop()

    def data_received(self, data):
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = LENGTH.search(head)
        if len(body) < (int(length[1]) if length else 0):
            return
        self.received = self.loop.time()
        self.buffer = b""
        if head.startswith(b"GET"):
            answer = b'{"object": "list", "data": [{"id": "fake"}]}'
            self.transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(answer), answer)
            )
            return
        delay, gap = DELAY.search(body), GAP.search(body)
        self.delay = float(delay[1]) if delay else 0.0
        self.gap = float(gap[1]) if gap else 0.0
        self.left = int(TOKENS.search(body)[1])
        self.transport.write(HEAD)
        self.due = self.received + self.delay
        self.loop.call_at(self.due, self.first)

    def first(self):
        waited = self.loop.time() - self.received
        self.left -= 1
        self.transport.write(chunk(f"{waited:.6f}"))
        self.next()

    def token(self):
        if self.transport.is_closing():
            return
        self.left -= 1
        self.transport.write(TOKEN)
        self.next()

    def next(self):
        if self.left <= 0:
            usage = b'{"object": "chat.completion.chunk", "choices": [], "usage": null}'
            self.transport.write(LAST + event(usage) + END)
            return
        self.due += self.gap
        self.loop.call_at(self.due, self.token)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stream, "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[2])})
    uvloop.run(main(int(sys.argv[1])))
