"""Pages of keys and values on their way between devices, hosts and layouts."""
