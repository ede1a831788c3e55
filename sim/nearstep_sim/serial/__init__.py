"""A board's end of the serial link, in software."""
