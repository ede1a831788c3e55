"""Homes: where the arrays of an optimizer are kept, and where blocks of them are updated."""
