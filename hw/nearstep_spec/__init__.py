"""Contracts of hardware and host: configurations, registers, rules, as plain data."""
