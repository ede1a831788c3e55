"""Update rules: one definition gives RTL, golden models, registers and latency."""
