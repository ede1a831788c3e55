"""Files that keep what devices hold."""
