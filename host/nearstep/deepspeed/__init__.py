"""Configurations in DeepSpeed's spelling."""
