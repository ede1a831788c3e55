"""Update rules compiled into pipelined units."""
