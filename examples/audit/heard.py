"""Print what people heard of the extract: the newest messages in its channel of the sandbox's Slack, replies in threads indented."""

from __future__ import annotations

import os
import sys

import requests

answer = requests.get(f"{os.environ['SERVICENOW_URL']}/sandbox/messages", timeout=30)
messages = [message for message in answer.json()["messages"] if message["channel"] == "audit"]
for message in messages[-int(sys.argv[1]) :]:
    print(f"{'  ↳ ' if message.get('thread_ts') else ''}{message['text']}")
