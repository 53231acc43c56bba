"""Load or build a model. The one place that knows what a decoder layer looks like inside."""
