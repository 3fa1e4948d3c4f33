"""A daemon by the book, but with the pipes and files of its parent left open: double fork, own session."""

import os
import sys
import time

if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
time.sleep(600)
