"""Oracles and tiny random targets for the tests: nothing here computes an expectation with the code under test."""
