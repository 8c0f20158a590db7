"""The program that gives hosts their image from the head: see __main__.py."""
