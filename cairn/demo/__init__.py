"""The demonstration: hides facts in a long document, asks for them, shows time and memory."""
