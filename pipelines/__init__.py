"""Schedules: what a kernel's tiles, stages, warp roles and registers are, and which one is best."""
