"""Recorders, one file for one method: each calls the authors' own functions on seeded inputs and returns fixtures."""
