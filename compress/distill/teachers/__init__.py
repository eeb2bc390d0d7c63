"""Who teaches: loading teachers, several as one, and what they said before."""
