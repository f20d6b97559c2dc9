"""Pieces that several kernels use and no architecture owns."""
