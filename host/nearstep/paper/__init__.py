"""Tables and figures of the papers beside modelled and measured ones."""
