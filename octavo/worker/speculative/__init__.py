"""Where guesses come from. See docs/speculative.md."""
