import json
import os

import pika

payments = [{"id": "invoice-4712", "amount": 1299, "currency": "EUR", "account": "customer-17"}]

connection = pika.BlockingConnection(pika.URLParameters(os.environ["AMQP_URL"]))
channel = connection.channel()
channel.confirm_delivery()  # from now on basic_publish waits for the broker, and raises what it says
for payment in payments:
    channel.basic_publish(
        exchange="payments",
        routing_key="acme",  # the provider's name
        body=json.dumps(payment),
        properties=pika.BasicProperties(
            content_type="application/json",
            delivery_mode=2,  # persistent
            message_id=payment["id"],
        ),
        mandatory=True,  # raises UnroutableError when no queue takes it, instead of dropping it
    )
connection.close()
