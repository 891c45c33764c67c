"""A cable between two network interfaces that delays, reorders and loses packets.

`tc netem` does this too, where the kernel has it; this needs packet sockets only.

    wire.py prepare INTERFACE                          checksums are written by software
    wire.py carry LEFT RIGHT DELAY_MS JITTER_MS LOSS_PERCENT
"""
import fcntl
import heapq
import random
import select
import socket
import struct
import sys
import time

SIOCETHTOOL = 0x8946
# ETHTOOL_STXCSUM, ETHTOOL_SSG, ETHTOOL_STSO, ETHTOOL_SGSO
OFFLOADS = (0x17, 0x19, 0x1F, 0x24)
ALL_PROTOCOLS = 3
OUTGOING = 4


def prepare(interface):
    import array

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for offload in OFFLOADS:
            value = array.array("B", struct.pack("II", offload, 0))
            request = struct.pack("16sP16x", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(control, SIOCETHTOOL, request)


def end_of(interface):
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    end.bind((interface, ALL_PROTOCOLS))
    end.setblocking(False)
    return end


def carry(left, right, delay, jitter, loss):
    ends = [end_of(left), end_of(right)]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    under_way, number = [], 0
    print("carries", flush=True)
    while True:
        wait = max(0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], wait)[0]:
            while True:
                try:
                    packet, address = end.recvfrom(65535)
                except BlockingIOError:
                    break
                if address[2] == OUTGOING or random.random() < loss:
                    continue
                number += 1
                due = time.monotonic() + delay + random.random() * jitter
                heapq.heappush(under_way, (due, number, other[end], packet))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, end, packet = heapq.heappop(under_way)
            try:
                end.send(packet)
            except OSError:
                pass


if sys.argv[1] == "prepare":
    prepare(sys.argv[2])
else:
    delay, jitter, loss = (float(number) for number in sys.argv[4:7])
    carry(sys.argv[2], sys.argv[3], delay / 1000, jitter / 1000, loss / 100)
