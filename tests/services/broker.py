"""Producer and consumer with pika, the Python client for RabbitMQ.

publish HOST-URL            JSON lines on stdin: {"key": routing key, "body": text, "hex": bytes}; prints how many were confirmed
bind HOST-URL QUEUE EXCHANGE PATTERN
delete HOST-URL QUEUE...     deletes queues with everything in them; prints how many messages those were
ready HOST-URL QUEUE...      prints how many messages are ready in each
drain HOST-URL QUEUE        prints and takes every message: {"body": text, "headers": {...}, "key": ..., "id": ...}
"""
import json
import sys

import pika


def main():
    command, url, *rest = sys.argv[1:]
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    if command == "publish":
        channel.confirm_delivery()
        confirmed = 0
        for line in sys.stdin:
            message = json.loads(line)
            body = bytes.fromhex(message["hex"]) if "hex" in message else message["body"].encode()
            properties = pika.BasicProperties(content_type="application/json", delivery_mode=2)
            # Raises if the broker rejects or returns the message.
            channel.basic_publish("payments", message["key"], body, properties, mandatory=True)
            confirmed += 1
        print(confirmed)
    elif command == "bind":
        queue, exchange, pattern = rest
        channel.queue_declare(queue, durable=True)
        channel.queue_bind(queue, exchange, pattern)
    elif command == "delete":
        print(sum(channel.queue_delete(queue).method.message_count for queue in rest))
    elif command == "ready":
        for queue in rest:
            print(channel.queue_declare(queue, passive=True).method.message_count)
    elif command == "drain":
        while True:
            method, properties, body = channel.basic_get(rest[0], auto_ack=True)
            if method is None:
                break
            headers = {key: str(value) for key, value in (properties.headers or {}).items()}
            text = body.decode("utf-8", "replace")
            print(json.dumps({"body": text, "headers": headers, "key": method.routing_key, "id": properties.message_id}))
    connection.close()


main()
