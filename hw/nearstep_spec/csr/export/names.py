"""Names common to all exports."""

from nearstep_spec.csr.model import NamedValue, RegisterMap


def enumerations(register_map: RegisterMap) -> dict[str, type[NamedValue]]:
    """Collect named values of fields, by `register_field`; each enumeration once."""
    found: dict[str, type[NamedValue]] = {}
    for register, field in register_map.fields():
        if field.values is not None and field.values not in found.values():
            found[f"{register.name}_{field.name}"] = field.values
    return found
