"""A deploy without operations: what is left is reading cluster.yaml and connecting."""
