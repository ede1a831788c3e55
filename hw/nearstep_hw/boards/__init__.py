"""Tops for boards that can be bought, and what a tool flow needs to make bitstreams of them."""
