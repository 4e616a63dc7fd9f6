"""The page cache: memory of keys and values, leases, prefix sharing and eviction.

Start with `landmarks.SlotMap` (the arithmetic between tokens, slots and pages) and
`paged.PageCache` (the whole life of a page). Only `pools` imports torch.
"""
