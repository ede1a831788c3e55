"""Everything that stands in for the world around the RTL."""
