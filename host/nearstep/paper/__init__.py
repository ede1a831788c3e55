"""Tables and figures of the papers, beside what this project models and measures."""
