"""The program that brings a model from one host to others: see __main__.py."""
