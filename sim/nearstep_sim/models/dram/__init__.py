"""The world around a DDR4 channel: device model, host memory controller, command traces."""
