"""The `cairn` command. Every command imports what it runs inside its function: help is instant."""
