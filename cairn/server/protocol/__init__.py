"""Structs of all requests and responses of the HTTP API, with types and bounds.

A request field is used, refused with a reason (`fields.refused`) or accepted without effect
(`fields.no_effect`). An unknown field is an error.
"""
