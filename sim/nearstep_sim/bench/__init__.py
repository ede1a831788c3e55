"""Verification benches: Verilated vector harness, cocotb runner, scoreboards."""
