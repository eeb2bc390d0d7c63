"""Which step may follow which, and which orders are poor."""
