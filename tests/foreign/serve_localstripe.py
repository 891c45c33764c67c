"""localstripe on loopback only, with its state in memory.

Its own start listens on every interface, and keeps a copy of its state at a fixed place in /tmp. Its errors lack the
`payment_intent` that Stripe documents (https://docs.stripe.com/api/errors), so it is added here.

serve_localstripe.py PORT
"""
import sys

from aiohttp import web
from localstripe import resources
from localstripe.errors import UserError
from localstripe.server import app

report_failure = resources.PaymentIntent._report_failure


def report_failure_of_intent(intent):
    try:
        report_failure(intent)
    except UserError as error:
        error.body["error"]["payment_intent"] = intent._export()
        raise


resources.PaymentIntent._report_failure = report_failure_of_intent
resources.Store.dump_to_disk = lambda self: None
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
