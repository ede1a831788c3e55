"""What all exports say alike."""

from nearstep_spec.csr.model import NamedValue, RegisterMap


def enumerations(register_map: RegisterMap) -> dict[str, type[NamedValue]]:
    """Named values of fields, by `register_field`; an enumeration used twice is there once."""
    found: dict[str, type[NamedValue]] = {}
    for register, field in register_map.fields():
        if field.values is not None and field.values not in found.values():
            found[f"{register.name}_{field.name}"] = field.values
    return found
