"""Register maps for other tools and languages: JSON, SystemRDL, a C header, Markdown."""

from collections.abc import Callable

from nearstep_spec.csr.export.c_header import to_c_header
from nearstep_spec.csr.export.markdown import to_markdown
from nearstep_spec.csr.export.systemrdl import to_systemrdl, to_systemrdl_space
from nearstep_spec.csr.model import RegisterMap

__all__ = ["FORMATS", "to_c_header", "to_markdown", "to_systemrdl", "to_systemrdl_space"]

FORMATS: dict[str, Callable[[RegisterMap], str]] = {
    "json": RegisterMap.to_json,
    "rdl": to_systemrdl,
    "c": to_c_header,
    "md": to_markdown,
}
"""The writer of each format, by its name on the command line."""
