"""A producer and a consumer with trace context, based on pika.

traced.py URL publish TRACEPARENT TRACESTATE   job messages on stdin, one per line
traced.py URL bind                             a queue `seen` for every outcome
traced.py URL seen                             prints body and headers of each outcome
"""
import json
import sys

import pika

url, command, *rest = sys.argv[1:]
connection = pika.BlockingConnection(pika.URLParameters(url))
channel = connection.channel()
if command == "publish":
    channel.confirm_delivery()
    headers = dict(zip(("traceparent", "tracestate"), rest))
    for line in sys.stdin:
        properties = pika.BasicProperties(content_type="application/json", delivery_mode=2, headers=headers)
        channel.basic_publish("payments", "acme", line.strip(), properties, mandatory=True)
elif command == "bind":
    channel.queue_declare("seen", durable=True)
    channel.queue_bind("seen", "payments.outcomes", "#")
elif command == "seen":
    while True:
        method, properties, body = channel.basic_get("seen", auto_ack=True)
        if method is None:
            break
        print(json.dumps({"body": json.loads(body), "headers": properties.headers or {}}))
connection.close()
