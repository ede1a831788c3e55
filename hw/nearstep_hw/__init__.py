"""Synthesizable hardware of nearstep, in Amaranth HDL."""
