"""Records from one engine's host memory to another's: prefill and decode in different processes.

`transfer.py` is what the engine's loop talks to, `tickets.py` and `sender.py` are the side that
prefills, `receiver.py` is the side that decodes, `wire.py` says what passes between the two.
"""
