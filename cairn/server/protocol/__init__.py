"""Structs of all requests and responses of the HTTP API, with types and bounds.

A field of a request is consumed, refused by name (`fields.refused`) or known to change nothing
(`fields.no_effect`). Anything else in a body is an error.
"""
