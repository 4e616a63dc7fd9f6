"""From logits to tokens: penalties, filters of probabilities, the draw."""
