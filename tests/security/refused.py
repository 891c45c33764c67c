"""Attempts of a broker user without the right to them. Each argument after the URL is one; prints a line for each.

declare:QUEUE  get:QUEUE  publish:EXCHANGE:KEY  bind:QUEUE:EXCHANGE  delete:QUEUE
"""
import sys

import pika


def attempt(channel, words):
    what, *rest = words
    if what == "declare":
        channel.queue_declare(rest[0], durable=True)
    elif what == "get":
        channel.basic_get(rest[0], auto_ack=False)
    elif what == "publish":
        channel.confirm_delivery()
        channel.basic_publish(rest[0], rest[1], b"{}")
    elif what == "bind":
        channel.queue_bind(rest[0], rest[1], "#")
    elif what == "delete":
        channel.queue_delete(rest[0])


for words in sys.argv[2:]:
    connection = pika.BlockingConnection(pika.URLParameters(sys.argv[1]))
    try:
        attempt(connection.channel(), words.split(":"))
        print("allowed")
    except pika.exceptions.ChannelClosedByBroker as error:
        print("refused" if error.reply_code == 403 else f"{error.reply_code} {error.reply_text}")
