"""A client that costs the server nothing: raw sockets, epoll, the time taken at each recv, all parsing afterwards.

    python -m slipstream.profiling.stream_client < {"port", "path", "bodies", "num_tokens"} > {numbers}

It runs in a process of its own, all streams at once, each on its own connection, opened before the first is sent.
"""

from __future__ import annotations

import gc
import json
import math
import re
import select
import socket
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

IDS = re.compile(rb'"output_ids":\[([^\]]*)\]')


def read_streams(port: int, path: str, bodies: Sequence[dict[str, object]], num_tokens: int) -> dict[str, float]:
    """Send every body at once and read until all streams, of `num_tokens` each, have ended; the numbers of `summary`."""
    gc.disable()  # a pause of this process would be taken for one of the server's
    poll = select.epoll()
    socks: dict[int, socket.socket] = {}
    requests: dict[int, bytes] = {}
    for body in bodies:
        payload = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", port))
        head = f"POST {path} HTTP/1.1\r\nhost: b\r\nconnection: close\r\ncontent-length: {len(payload)}\r\n\r\n"
        socks[sock.fileno()], requests[sock.fileno()] = sock, head.encode() + payload
    sent: dict[int, float] = {}
    for descriptor, sock in socks.items():
        sent[descriptor] = time.perf_counter()
        sock.sendall(requests[descriptor])
        sock.setblocking(False)
        poll.register(sock, select.EPOLLIN)
    seen: list[tuple[float, int, bytes]] = []
    num_open = len(socks)
    while num_open:
        for descriptor, _ in poll.poll():
            received = socks[descriptor].recv(65536)
            if received:
                seen.append((time.perf_counter(), descriptor, received))
            else:
                poll.unregister(descriptor)
                num_open -= 1
    for sock in socks.values():
        sock.close()
    return _numbers(sent, seen, num_tokens)


def _numbers(sent: dict[int, float], seen: list[tuple[float, int, bytes]], num_tokens: int) -> dict[str, float]:
    times: dict[int, list[float]] = {descriptor: [] for descriptor in sent}
    whole: dict[int, bytearray] = {descriptor: bytearray() for descriptor in sent}
    for at, descriptor, received in seen:
        # A frame with a token, and no other, has an empty finish_reason or no meta_info.
        count = received.count(b'"finish_reason":null') + received.count(b'"meta_info":null')
        times[descriptor].extend([at] * count)
        whole[descriptor] += received
    wall = seen[-1][0] - min(sent.values())
    first = [(stream[0] - sent[descriptor]) * 1e3 for descriptor, stream in times.items() if stream]
    ids = sum(found.count(b",") + 1 for body in whole.values() for found in IDS.findall(bytes(body)) if found)
    return {
        "ttft_ms_p50": quantile(first, 0.5),
        "ttft_ms_p99": quantile(first, 0.99),
        **summary(list(times.values()), wall, num_tokens),
        "ids": ids,
        "unfinished": sum(
            b'"finish_reason":"' not in body and b'"finish_reason":{' not in body for body in whole.values()
        ),
    }


def summary(times: Sequence[Sequence[float]], wall_s: float, num_tokens: int) -> dict[str, float]:
    """Inter-token milliseconds over all streams; events a second, starts and ends included; and the tokens a second that
    the streams have between their own first and last events, however many events those came in.
    """
    gaps = [(after - before) * 1e3 for stream in times for before, after in pairwise(stream)]
    num_events = sum(map(len, times))
    return {
        "itl_ms_p50": quantile(gaps, 0.5),
        "itl_ms_p99": quantile(gaps, 0.99),
        "itl_ms_max": max(gaps, default=0.0),
        "events": num_events,
        "events_per_s": num_events / wall_s,
        "steady_tokens_per_s": sum((num_tokens - 1) / (each[-1] - each[0]) for each in times if len(each) > 1),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The least of them that `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


async def run_client(port: int, path: str, bodies: Sequence[dict[str, object]], num_tokens: int) -> dict[str, float]:
    """`read_streams` in a process of its own, started as `ChildProcess` starts one: a fork would cost the first answers a
    millisecond.
    """
    import asyncio
    import subprocess

    asked = json.dumps({"port": port, "path": path, "bodies": bodies, "num_tokens": num_tokens}).encode()
    command = [sys.executable, "-m", "slipstream.profiling.stream_client"]
    output = (await asyncio.to_thread(subprocess.run, command, input=asked, stdout=subprocess.PIPE, check=True)).stdout
    numbers: dict[str, Any] = json.loads(output)
    return numbers


if __name__ == "__main__":
    print(json.dumps(read_streams(**json.load(sys.stdin))))
