"""Pages: where keys and values live, who holds them, which may be shared or dropped.

Start with `landmarks.SlotMap` (the arithmetic between tokens, slots and pages) and
`paged.PageCache` (the whole life of a page). Only `pools` imports torch.
"""
