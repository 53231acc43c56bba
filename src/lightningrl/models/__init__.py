"""Load or build a model. Only this package knows the inside of a decoder layer."""
