"""A client of its own process that streams one answer and tells the largest pause between events.

``python watch_stream.py HOST PORT [MAX_TOKENS]`` prints "streaming" after the first event. For each
line on stdin it prints the largest pause, in seconds, since the line before (one that still lasts
counts).
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    most = int(sys.argv[3]) if len(sys.argv) > 3 else 100_000
    body = json.dumps(
        {"prompt": "x", "max_tokens": most, "stream": True, "ignore_eos": True}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection = socket.create_connection((host, port))
    connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert b" 200 " in connection.recv(1 << 16)
    print("streaming", flush=True)
    largest, last = 0.0, time.monotonic()
    while True:
        ready, _, _ = select.select([connection, sys.stdin], [], [])
        now = time.monotonic()
        if connection in ready:
            if not connection.recv(1 << 20):
                sys.exit("the stream ended")
            largest, last = max(largest, now - last), now
        if sys.stdin in ready:
            if not sys.stdin.readline():
                return
            print(max(largest, now - last), flush=True)
            largest = 0.0


if __name__ == "__main__":
    main()
