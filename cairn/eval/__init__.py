"""Does a model still find, follow and predict at length, and do two engines agree on its logits?"""
