"""The stored runs and sweeps as a database: what there is, what is left to do, what may go, questions over all."""
