"""What the engine tells about itself: log lines and progress bars. No torch here."""
