"""Images and videos of prompts: where they come from, how they are decoded and resized, and which
tokens stand for them. Loads no torch."""
