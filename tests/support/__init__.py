"""Oracles and tiny random targets shared by the tests: nothing here computes an expectation with the code under test."""
