"""Stream plumbing."""
