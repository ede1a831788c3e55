"""The board's end of the serial link: a UART, frames, and what carries requests out."""
