"""The page on which people look at runs: static files, and a JSON API over `look`. It reads and never writes."""
