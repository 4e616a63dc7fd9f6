"""The demonstration: asks for facts that are hidden in a long document, and shows time and
memory."""
