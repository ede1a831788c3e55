"""Graphs of the operations of a step, and their execution in device or modelled time."""
