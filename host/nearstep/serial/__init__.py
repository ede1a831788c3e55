"""The host's side of a serial link to a board."""
