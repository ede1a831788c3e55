"""Descriptions of machines: processors, memories, links and drives, with the origin of each figure."""
