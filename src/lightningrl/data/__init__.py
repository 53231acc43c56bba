"""Records → transitions → forest, in pure numpy."""
