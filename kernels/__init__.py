"""Device side of fa4: attention kernels in CuTe-DSL, imported only to compile them."""
