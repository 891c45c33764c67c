"""localstripe as it is, on loopback alone and with its state in memory.

Its own start listens on every interface, and keeps a copy of its state at a fixed place in /tmp.

serve_localstripe.py PORT
"""
import sys

from aiohttp import web
from localstripe import resources
from localstripe.server import app

resources.Store.dump_to_disk = lambda self: None
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
