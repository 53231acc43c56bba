"""A service that speaks the Tinker API, through its official SDK."""
