"""What the machine that this runs on can do: copies, drives, arithmetic."""
