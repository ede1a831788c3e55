"""An unmodified Linux below an unmodified QEMU, in front of a card."""
