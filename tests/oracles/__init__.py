"""Independent references in float64 NumPy, written from the formulas; none of them imports the code under test."""
