"""Fills a RabbitMQ queue fast: AMQP 0-9-1 as far as publishing with confirms needs it, by the standard library alone."""

import contextlib
import socket
import struct
from urllib.parse import unquote, urlsplit

# Most publishes without a confirm.
UNCONFIRMED_MAX = 4_000
METHOD, HEADER, BODY = 1, 2, 3
# content-type, delivery-mode, message-id
FLAGS = 0x8000 | 0x1000 | 0x0080
PERSISTENT = 2


def short(text):
    data = text.encode()
    return bytes([len(data)]) + data


def frame(kind, channel, payload):
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def method(channel, numbers, arguments=b""):
    return frame(METHOD, channel, struct.pack(">HH", *numbers) + arguments)


class Connection:
    def __init__(self, url):
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port or 5672), timeout=60)
        self.stream = self.socket.makefile("rb")
        self.socket.sendall(b"AMQP\x00\x00\x09\x01")
        self.expect((10, 10))
        said = f"\0{unquote(parts.username)}\0{unquote(parts.password)}".encode()
        answer = struct.pack(">I", 0) + short("PLAIN") + struct.pack(">I", len(said)) + said + short("en_US")
        self.socket.sendall(method(0, (10, 11), answer))
        tune = self.expect((10, 30))
        channels, size, _ = struct.unpack(">HIH", tune[:8])
        self.socket.sendall(method(0, (10, 31), struct.pack(">HIH", channels, size, 0)))
        host = unquote(parts.path[1:]) or "/"
        self.socket.sendall(method(0, (10, 40), short(host) + short("") + b"\x00"))
        self.expect((10, 41))
        self.socket.sendall(method(1, (20, 10), short("")))
        self.expect((20, 11))
        self.socket.sendall(method(1, (85, 10), b"\x00"))
        self.expect((85, 11))
        self.sent = self.confirmed = 0

    def read(self):
        """The next method frame: its numbers and arguments."""
        while True:
            kind, _, size = struct.unpack(">BHI", self.stream.read(7))
            payload = self.stream.read(size + 1)[:-1]
            if kind == METHOD:
                return struct.unpack(">HH", payload[:4]), payload[4:]

    def expect(self, wanted):
        while True:
            numbers, arguments = self.read()
            if numbers == wanted:
                return arguments
            if numbers == (60, 80):
                tag, multiple = struct.unpack(">QB", arguments)
                self.confirmed = tag if multiple else self.confirmed + 1
                continue
            raise SystemExit(f"RabbitMQ says {numbers}: {arguments!r}")

    def confirm(self, outstanding):
        while self.sent - self.confirmed > outstanding:
            numbers, arguments = self.read()
            if numbers != (60, 80):
                raise SystemExit(f"RabbitMQ says {numbers}: {arguments!r}")
            tag, multiple = struct.unpack(">QB", arguments)
            # Single confirms are counted one by one, multiple ones by their delivery tag.
            self.confirmed = max(self.confirmed + 1, tag) if multiple else self.confirmed + 1

    def publish(self, queue, messages):
        """Publishes (id, body) directly to a queue, and returns when the broker has confirmed all of them."""
        start = method(1, (60, 40), struct.pack(">H", 0) + short("") + short(queue) + b"\x00")
        together = []
        for identity, body in messages:
            body = body.encode()
            properties = short("application/json") + bytes([PERSISTENT]) + short(identity)
            header = struct.pack(">HHQH", 60, 0, len(body), FLAGS) + properties
            together.append(start + frame(HEADER, 1, header) + frame(BODY, 1, body))
            if len(together) == 500:
                self.flush(together)
        self.flush(together)
        self.confirm(0)

    def flush(self, together):
        self.socket.sendall(b"".join(together))
        self.sent += len(together)
        together.clear()
        self.confirm(UNCONFIRMED_MAX)

    def declare(self, queue):
        """Declares a durable quorum queue."""
        kind = b"\x0cx-queue-typeS" + struct.pack(">I", 6) + b"quorum"
        arguments = struct.pack(">I", len(kind)) + kind
        self.socket.sendall(method(1, (50, 10), struct.pack(">H", 0) + short(queue) + b"\x02" + arguments))
        self.expect((50, 11))

    def depth(self, queue):
        self.socket.sendall(method(1, (50, 10), struct.pack(">H", 0) + short(queue) + b"\x01" + struct.pack(">I", 0)))
        answer = self.expect((50, 11))
        return struct.unpack(">I", answer[1 + answer[0] : 5 + answer[0]])[0]

    def delete(self, queue):
        self.socket.sendall(method(1, (50, 40), struct.pack(">H", 0) + short(queue) + b"\x00"))
        self.expect((50, 41))

    def close(self):
        self.socket.close()


@contextlib.contextmanager
def connected(url):
    connection = Connection(url)
    try:
        yield connection
    finally:
        connection.close()
