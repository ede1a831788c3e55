"""Tops for commercial boards, and inputs of the tool flow for their bitstreams."""
