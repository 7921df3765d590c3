"""A client of its own process that streams answers, one after the other, and tells the largest
pause between events.

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
    asked = {"prompt": "x", "max_tokens": most, "stream": True, "ignore_eos": True}
    body = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
    connection = socket.create_connection((host, port))
    connection.sendall(request)
    assert b" 200 " in connection.recv(1 << 16)
    print("streaming", flush=True)
    largest, last = 0.0, time.monotonic()
    while True:
        ready, _, _ = select.select([connection, sys.stdin], [], [])
        now = time.monotonic()
        if connection in ready:
            data = connection.recv(1 << 20)
            if not data:
                sys.exit("the stream ended")
            largest, last = max(largest, now - last), now
            if b"[DONE]" in data:  # it goes on with another
                connection.sendall(request)
        if sys.stdin in ready:
            if not sys.stdin.readline():
                return
            print(max(largest, now - last), flush=True)
            largest = 0.0


if __name__ == "__main__":
    main()
