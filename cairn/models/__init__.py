"""Models: a config mapping per family, one decoder, one loader."""
