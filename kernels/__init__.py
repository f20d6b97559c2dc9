"""Device side of fa4: attention kernels in CuTe-DSL. Import a kernel's module only to compile it."""
