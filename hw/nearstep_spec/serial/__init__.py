"""The serial link between a host and a board."""
