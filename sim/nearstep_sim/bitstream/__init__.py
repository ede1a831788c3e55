"""Bitstreams: from a plan of Amaranth to a `.bit`, a report and a picture, with open tools."""
