"""The `cairn` command. Commands import the engine inside their functions, so that help is fast."""
