"""What hardware and host agree on: configurations, registers, rules, as plain data."""
