"""Launch cache: recorded kernel launches of op calls, replayed without repeating the host work
before them."""
