"""The same ops, same names and signatures, in plain torch: the oracle for the kernels and the path used on the CPU."""
