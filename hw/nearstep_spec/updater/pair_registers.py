"""Registers of gradients as pairs, or as records of a user's decompressor."""

from nearstep_spec.csr.block import Row, register, value_register
from nearstep_spec.csr.model import Access, NamedValue, Register
from nearstep_spec.rule.file import is_in_file
from nearstep_spec.updater.config import INDEX, UpdateKernelConfig

__all__ = ["Compression", "UserForm", "decompressor_registers", "form_value", "pair_registers"]


class Compression(NamedValue):
    """`compression.form`: form of the gradients of a run in memory."""

    NONE = 0, "Every element, at g_address."
    FUSED = 1, "Pairs, indices sorted: values at g_address, indices at index_address."
    SCATTER = 2, "Pairs, grouped by block, in any order within a block."


class UserForm(NamedValue):
    """`compression.form` of a kernel with a user's decompressor."""

    NONE = 0, "Every element, at g_address."
    USER = 3, "Records of the decompressor: values at g_address, words at index_address."


def form_value(form: str) -> int:
    """Return `compression.form` for `none`, or for a form of a kernel."""
    return UserForm.USER if is_in_file(form) else Compression[form.upper()]


def decompressor_registers(config: UpdateKernelConfig) -> list[Register]:
    """Return the constant that identifies the user's decompressor, if any."""
    found = config.decompressor
    if found is None:
        return []
    what = "First 32 bits of the SHA-256 of the decompressor's name and file."
    digest: Row = ("digest", 0, 32, what, found.mark)
    return [register("decompressor", Access.CONSTANT, "The user's decompressor.", digest)]


def pair_registers(config: UpdateKernelConfig) -> list[Register]:
    """Return the registers of a run with pairs."""
    forms = UserForm if config.decompressors else Compression
    form: Row = ("form", 0, 4, "Form of the gradients.", forms)
    return [
        register("compression", Access.CONFIG, "Gradients as pairs.", form, locked=True),
        value_register(
            "index_address",
            Access.CONFIG,
            "Byte address of the indices, 32 bits each; a multiple of a memory beat.",
            width=64,
            locked=True,
            path=("address", INDEX),
        ),
        value_register("pairs", Access.CONFIG, "Pairs; 0: gradients are 0.", width=64, locked=True),
    ]
